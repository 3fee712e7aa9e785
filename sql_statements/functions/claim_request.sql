-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Take generations of the best request that a worker may serve, and write a job for each.
--
-- The request is the best of the classes listed, or `contested` alone, whose holder is waited for.
-- Without one, rows that others hold are passed over. One row when there was anything to take, with
-- the id of the best of it; all else of it is null when others held everything.
CREATE OR REPLACE FUNCTION claim_request(
    classes bigint[],
    max_lengths integer[], -- tokens that the worker takes, class by class
    max_context_lengths integer[],
    models text[], -- what a job of each class is given
    lease_capacity double precision, -- tokens of a chat job that the worker finishes in time
    only_user integer, -- whom a worker in maintenance serves; null is everybody
    preferred_users integer[],
    contested uuid,
    wait text, -- as `lock_timeout` has it, for the contested row
    wanted integer,
    job_ids uuid[], -- as many as are wanted
    worker uuid,
    chat_max_context_length integer,
    chat_max_length integer,
    transports text[], -- of a chat with nothing stored, with images, stored whole, and both
    ttl integer,
    moment timestamp,
    new_expiry timestamp
) RETURNS TABLE (
    first_id uuid, taken integer, remaining integer, model text, id uuid, user_id integer,
    queue_class bigint, prompt text, gen_payload jsonb, is_chat boolean,
    chat_messages_offloaded boolean, max_length integer, max_context_length integer,
    created timestamp, sharedkey_id uuid, messages text, chat_extras text
)
LANGUAGE plpgsql
-- The plan is kept for all queues, also the one that is empty now: the index has the order.
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    best_id uuid;
    chosen_id uuid;
    chosen_n integer;
BEGIN
    IF contested IS NOT NULL THEN
        PERFORM set_config('lock_timeout', wait, true);
        SELECT request.id, request.n INTO chosen_id, chosen_n FROM waiting_prompts AS request
        WHERE request.id = contested AND request.active AND NOT request.faulted AND request.n > 0
        FOR NO KEY UPDATE;
    ELSE
        WITH servable AS (
            SELECT * FROM unnest(classes, max_lengths, max_context_lengths)
                AS listed (class, length, context_length)
        ), general AS (
            SELECT 0 AS is_preferred, waiting.id, waiting.rank, waiting.created
            FROM servable, LATERAL (
                SELECT request.id, request.created,
                    request.extra_priority - 5 * date_part('epoch', request.created) AS rank
                FROM waiting_prompts AS request
                WHERE only_user IS NULL
                    AND request.active AND NOT request.faulted AND request.n > 0
                    AND request.wp_type = 'text'
                    AND request.queue_class = servable.class
                    -- Both lengths are in the index: rows too long cost no visit.
                    AND request.max_length <= servable.length
                    AND request.max_context_length <= servable.context_length
                    AND request.expiry > moment
                    AND (NOT request.is_chat OR request.max_length <= lease_capacity)
                ORDER BY request.extra_priority - 5 * date_part('epoch', request.created) DESC,
                    request.created, request.id
                LIMIT 20 -- enough that workers popping at once each find one that nobody holds
            ) AS waiting
            ORDER BY waiting.rank DESC, waiting.created, waiting.id
            LIMIT 20
        ), preferred AS (
            SELECT 1 AS is_preferred, waiting.id, waiting.rank, waiting.created
            FROM unnest(preferred_users) AS preferred_user, LATERAL (
                SELECT request.id, request.created,
                    request.extra_priority - 5 * date_part('epoch', request.created) AS rank
                FROM waiting_prompts AS request
                WHERE (only_user IS NULL OR preferred_user = only_user)
                    AND request.active AND NOT request.faulted AND request.n > 0
                    AND request.wp_type = 'text'
                    AND request.user_id = preferred_user
                    AND request.queue_class = ANY (classes)
                    AND request.max_length
                        <= max_lengths[array_position(classes, request.queue_class)]
                    AND request.max_context_length
                        <= max_context_lengths[array_position(classes, request.queue_class)]
                    AND request.expiry > moment
                    AND (NOT request.is_chat OR request.max_length <= lease_capacity)
                ORDER BY request.extra_priority - 5 * date_part('epoch', request.created) DESC
                LIMIT 20
            ) AS waiting
            ORDER BY waiting.rank DESC
            LIMIT 20
        ), best AS MATERIALIZED (
            SELECT candidate.id, max(candidate.is_preferred) AS is_preferred,
                max(candidate.rank) AS rank, min(candidate.created) AS created
            FROM (SELECT * FROM general UNION ALL SELECT * FROM preferred) AS candidate
            GROUP BY candidate.id
        ), chosen AS (
            SELECT request.id, request.n
            FROM best JOIN waiting_prompts AS request ON request.id = best.id
            WHERE request.active AND NOT request.faulted AND request.n > 0
            ORDER BY best.is_preferred DESC, best.rank DESC, best.created, best.id
            LIMIT 1
            FOR NO KEY UPDATE OF request SKIP LOCKED
        )
        SELECT best.id, chosen.id, chosen.n INTO best_id, chosen_id, chosen_n
        FROM best LEFT JOIN chosen ON true
        ORDER BY best.is_preferred DESC, best.rank DESC, best.created, best.id
        LIMIT 1;
    END IF;
    IF chosen_id IS NULL THEN
        IF best_id IS NOT NULL THEN
            first_id := best_id;
            RETURN NEXT;
        END IF;
        RETURN;
    END IF;
    RETURN QUERY WITH request AS (
        UPDATE waiting_prompts AS stored
        SET n = CASE
                WHEN stored.is_chat THEN chosen_n - 1 ELSE greatest(chosen_n - wanted, 0) END,
            expiry = greatest(stored.expiry, new_expiry)
        WHERE stored.id = chosen_id
        RETURNING stored.*, chosen_n - stored.n AS taken,
            models[array_position(classes, stored.queue_class)] AS model
    ), written AS (
        INSERT INTO processing_gens (
            id, procgen_type, model, seed, start_time, created, cancelled, faulted, fake, censored,
            job_ttl, wp_id, worker_id, over_capacity_at_assignment, assigned_model,
            assigned_max_context_length, assigned_max_length, image_transport
        )
        SELECT job.id, 'text', request.model, 0, moment, moment, false, false, false, false, ttl,
            request.id, worker,
            NOT request.is_chat AND request.max_length > lease_capacity,
            CASE WHEN request.is_chat THEN request.model END,
            CASE WHEN request.is_chat THEN chat_max_context_length END,
            CASE WHEN request.is_chat THEN chat_max_length END,
            CASE WHEN request.is_chat THEN transports[
                1 + (request.messages @> '[{"content": [{"type": "image_url"}]}]')::integer
                + 2 * request.chat_messages_offloaded::integer
            ] END
        FROM request, unnest(job_ids[1:request.taken]) AS job (id)
    )
    SELECT request.id, request.taken, request.n, request.model, request.id, request.user_id,
        request.queue_class, request.prompt, request.gen_payload, request.is_chat,
        request.chat_messages_offloaded, request.max_length, request.max_context_length,
        request.created, request.sharedkey_id,
        coalesce(request.messages_text, request.messages::text),
        coalesce(request.chat_extras_text, request.chat_extras::text)
    FROM request;
END $$;

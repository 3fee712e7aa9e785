-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Everything that a stored reply moves: its job, the request, its hold, the samples and postings.
--
-- One row when the job was pending, and without one nothing is written. The request is locked
-- first: whoever stores the last reply sees all others and ends it.
CREATE OR REPLACE FUNCTION settle_reply(
    job uuid,
    request uuid,
    reply text,
    metadata jsonb,
    seed bigint, -- of text alone
    censored boolean,
    message jsonb, -- this and what follows up to the charge is null on text
    finish_reason text,
    native_finish_reason text,
    prompt_tokens integer,
    completion_tokens integer,
    reasoning_tokens integer,
    charge_basis text,
    charge integer, -- whole kudos, onto what the request has cost
    hold text,
    speed double precision, -- tokens a second
    generated_tokens integer,
    seconds double precision,
    things integer, -- tokens that are paid for
    prompt_length integer, -- characters
    bridge_agent text,
    entry_types text[], -- this and what follows is for `append_postings`
    user_ids integer[],
    accounts text[],
    amounts numeric[],
    reservation_ids text[],
    additions json,
    moment timestamp,
    new_expiry timestamp
) RETURNS TABLE (finished_count integer, is_done boolean)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    asked record;
    settled record;
    is_idle boolean;
    is_complete boolean;
BEGIN
    SELECT n, jobs, faulted, terminal_outcome, max_length, max_context_length, softprompt,
        client_agent, style_id
    INTO asked
    FROM waiting_prompts WHERE id = request FOR NO KEY UPDATE;
    UPDATE processing_gens AS stored
    SET generation = reply, gen_metadata = metadata,
        seed = coalesce(settle_reply.seed, stored.seed), censored = settle_reply.censored,
        message = settle_reply.message, finish_reason = settle_reply.finish_reason,
        native_finish_reason = settle_reply.native_finish_reason,
        prompt_tokens = settle_reply.prompt_tokens,
        completion_tokens = settle_reply.completion_tokens,
        reasoning_tokens = settle_reply.reasoning_tokens, charge_basis = settle_reply.charge_basis
    WHERE stored.id = job AND stored.wp_id = request AND stored.generation IS NULL
        AND NOT stored.faulted
    RETURNING stored.model, stored.worker_id, stored.start_time INTO settled;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT count(*) FILTER (WHERE stored.generation IS NOT NULL),
        count(*) FILTER (WHERE stored.generation IS NULL AND NOT stored.faulted) = 0
    INTO finished_count, is_idle
    FROM processing_gens AS stored WHERE stored.wp_id = request AND NOT stored.fake;
    is_complete := asked.n = 0
        AND (finished_count >= asked.jobs OR asked.terminal_outcome IS NOT NULL);
    is_done := is_idle AND is_complete AND NOT asked.faulted;

    IF is_idle AND (is_complete OR asked.faulted) THEN
        UPDATE waiting_prompts AS ended
        SET consumed_kudos = ended.consumed_kudos + charge,
            expiry = greatest(ended.expiry, new_expiry),
            terminal_outcome = coalesce(ended.terminal_outcome, 'completed'),
            terminal_recorded_at = CASE
                WHEN ended.terminal_outcome IS NULL THEN moment ELSE ended.terminal_recorded_at END
        WHERE ended.id = request;
        UPDATE kudos_reservations SET active = false, released_at = moment
        WHERE business_id = hold AND active;
    ELSE
        UPDATE waiting_prompts AS charged
        SET consumed_kudos = charged.consumed_kudos + charge,
            expiry = greatest(charged.expiry, new_expiry)
        WHERE charged.id = request;
    END IF;

    INSERT INTO worker_performances (worker_id, performance, generated_tokens, seconds, created)
    VALUES (settled.worker_id, speed, generated_tokens, seconds, moment);
    INSERT INTO model_performances (model, performance, created)
    VALUES (settled.model, speed, moment);
    INSERT INTO horde_fulfillments (things, thing_type, deliver_time, created)
    VALUES (things, 'text', settled.start_time, moment);
    INSERT INTO text_gen_stats (
        finished, created, model, max_length, max_context_length, softprompt, prompt_length,
        client_agent, bridge_agent, state, style_id
    ) VALUES (
        moment, settled.start_time, settled.model, asked.max_length, asked.max_context_length,
        asked.softprompt, prompt_length, asked.client_agent, bridge_agent,
        CASE WHEN censored THEN 'CENSORED' ELSE 'OK' END::textgenstate, asked.style_id
    );
    PERFORM append_postings(
        job, entry_types, user_ids, accounts, amounts, reservation_ids, additions, moment
    );
    RETURN NEXT;
END $$;

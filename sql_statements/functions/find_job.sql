-- SPDX-License-Identifier: AGPL-3.0-or-later
-- A text or chat job with what its submit needs of the request and the worker; no row when it is
-- unknown.
CREATE OR REPLACE FUNCTION find_job(job_id uuid) RETURNS TABLE (
    id uuid, wp_id uuid, worker_id uuid, model varchar, is_completed boolean, is_faulted boolean,
    is_fake boolean, start_time timestamp, job_ttl integer, assigned_model varchar,
    chat_refusal_rc varchar, is_over_capacity boolean, is_chat boolean, chat_extras text,
    chat_conformance varchar, max_length integer, max_context_length integer, softprompt varchar,
    style_id uuid, prompt_characters integer, requester_id integer,
    requester_usage_multiplier double precision, sharedkey_id uuid, client_agent text,
    lists_workers boolean, has_hold boolean, is_request_cancelled boolean, webhook varchar,
    worker_name varchar, worker_owner_id integer, worker_owner_trusted boolean, bridge_agent text
)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT job.id, job.wp_id, job.worker_id, job.model, job.generation IS NOT NULL,
        job.faulted, job.fake, job.start_time, job.job_ttl, job.assigned_model, job.chat_refusal_rc,
        job.over_capacity_at_assignment, request.is_chat,
        coalesce(request.chat_extras_text, request.chat_extras::text), request.chat_conformance,
        request.max_length, request.max_context_length, request.softprompt, request.style_id,
        length(request.prompt), request.user_id, requester.usage_multiplier, request.sharedkey_id,
        request.client_agent,
        EXISTS (SELECT FROM wp_allowed_workers AS listed WHERE listed.wp_id = request.id),
        EXISTS (
            SELECT FROM kudos_reservations AS hold
            WHERE hold.business_id = 'upfront:' || request.id AND hold.active
        ),
        coalesce(request.terminal_outcome, '') = 'cancelled', request.webhook, worker.name,
        worker.user_id,
        EXISTS (
            SELECT FROM user_roles AS role
            WHERE role.user_id = worker.user_id AND role.user_role = 'TRUSTED' AND role.value
        ), worker.bridge_agent
    FROM processing_gens AS job
    JOIN waiting_prompts AS request ON request.id = job.wp_id
    JOIN workers AS worker ON worker.id = job.worker_id
    JOIN users AS requester ON requester.id = request.user_id
    WHERE job.id = find_job.job_id AND job.procgen_type = 'text';
END $$;

-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Show an inactive request to the workers, with its tax and what that moves; false when it is gone,
-- and then nothing moves.
--
-- A key that another request of the user claimed meanwhile breaks the unique index.
CREATE OR REPLACE FUNCTION activate_request(
    request uuid,
    priority integer,
    tax integer, -- whole kudos, onto what the request has cost
    key uuid,
    fingerprint text,
    entry_types text[], -- this and what follows is for `append_postings`
    user_ids integer[],
    accounts text[],
    amounts numeric[],
    reservation_ids text[],
    additions json,
    moment timestamp
) RETURNS boolean
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
BEGIN
    UPDATE waiting_prompts
    SET active = true, extra_priority = priority, consumed_kudos = consumed_kudos + tax,
        operation_key = key, operation_fingerprint = fingerprint
    WHERE id = request AND NOT active AND expiry > moment;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM append_postings(
        request, entry_types, user_ids, accounts, amounts, reservation_ids, additions, moment
    );
    RETURN true;
END $$;

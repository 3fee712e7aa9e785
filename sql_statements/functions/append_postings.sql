-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Append the postings of one event, and what it adds to counters; see `build_posting_parameters`.
CREATE OR REPLACE FUNCTION append_postings(
    event uuid,
    entry_types text[], -- the postings, column by column
    user_ids integer[],
    accounts text[],
    amounts numeric[],
    reservation_ids text[],
    additions json,
    moment timestamp
) RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    INSERT INTO kudos_ledger (
        event_id, entry_type, user_id, account, amount, reservation_id, created, applied
    )
    SELECT event, posting.*, moment, false
    FROM unnest(entry_types, user_ids, accounts, amounts, reservation_ids) AS posting;
    IF additions IS NOT NULL THEN
        INSERT INTO kudos_stat_queue (event_id, additions, created)
        VALUES (event, additions, moment);
    END IF;
END $$;

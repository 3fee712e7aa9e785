-- SPDX-License-Identifier: AGPL-3.0-or-later
-- Every class that has a waiting text or chat request, in order.
--
-- A loose index scan: it reads some entries, and goes on behind the last class it saw. One entry
-- where classes are deep, so that it costs one probe for each class however deep it is; more and
-- more where each entry is another class.
CREATE OR REPLACE FUNCTION list_queue_classes() RETURNS bigint[]
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $$
DECLARE
    found bigint[] := '{}';
    read bigint[];
    last bigint := -9223372036854775808;
    most integer := 1;
BEGIN
    LOOP
        SELECT array_agg(DISTINCT entry.queue_class) INTO read
        FROM (
            SELECT queue_class FROM waiting_prompts
            WHERE active AND NOT faulted AND n > 0 AND wp_type = 'text' AND queue_class > last
            ORDER BY queue_class LIMIT most
        ) AS entry;
        EXIT WHEN read IS NULL;
        found := found || read;
        last := read[cardinality(read)];
        most := CASE WHEN cardinality(read) * 2 > most THEN least(most * 2, 500) ELSE 1 END;
    END LOOP;
    RETURN found;
END $$;

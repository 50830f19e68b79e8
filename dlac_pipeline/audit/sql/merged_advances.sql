-- The advances of a surviving lineage as ledger rows. Those of a block that follow each other are one row. Rows that a later
-- audit needs one by one stay as they are: those of checkpoints with uneven shares, with reasons of a refusal, or not applied.
CREATE OR REPLACE TABLE merged_advances AS
WITH
moved AS (
    SELECT c.*, c.position_end - (c.token_end IS NOT NULL)::BIGINT AS read_to,
        {'position': c.position_start, 'token': coalesce(c.token_start, 0), 'until': c.position_end} AS place,
        u.checkpoint_id IS NOT NULL OR c.quarantine_reasons IS NOT NULL OR c.plan_id IS NULL OR c.leg IS NULL
            OR c.applied IS NOT true AS alone
    FROM consumption AS c
    SEMI JOIN lineage USING (run, checkpoint_id)
    LEFT JOIN (SELECT DISTINCT checkpoint_id FROM uneven_shares) AS u USING (checkpoint_id)
    WHERE c.kind = 'advance'
),
merged AS (
    SELECT
        run, kind, leg, source, cut_id, plan_id, pass, key_group, block, applied,
        max(seq) AS seq, max(step) AS step, arg_max(checkpoint_id, seq) AS checkpoint_id, arg_max(head_after, seq) AS head_after,
        min(position_start) AS position_start, max(position_end) AS position_end,
        min(first_step) AS first_step, max(last_step) AS last_step,
        arg_min_null(token_start, place) AS token_start, arg_max_null(token_end, place) AS token_end,
        sum(rows_consumed)::BIGINT AS rows_consumed, sum(rows_dead)::BIGINT AS rows_dead,
        sum(rows_filtered)::BIGINT AS rows_filtered, sum(rows_quarantined)::BIGINT AS rows_quarantined,
        flatten(list(filtered) FILTER (filtered IS NOT NULL)) AS filtered,
        flatten(list(quarantined) FILTER (quarantined IS NOT NULL)) AS quarantined
    FROM moved AS m
    WHERE NOT alone
    GROUP BY ALL
    -- In an exact ledger no two of them overlap: they follow each other if they are as long as what they span, and each begins at
    -- the token at which another one ends.
    HAVING max(read_to) - min(position_start) = sum(read_to - position_start)
        AND sum(coalesce(m.token_start, 0)) - coalesce(arg_min_null(m.token_start, place), 0)
            = sum(coalesce(m.token_end, 0)) - coalesce(arg_max_null(m.token_end, place), 0)
)
SELECT * FROM merged
UNION ALL BY NAME
SELECT * EXCLUDE (read_to, place, alone) FROM moved WHERE alone
UNION ALL BY NAME
SELECT m.* EXCLUDE (read_to, place, alone)
FROM moved AS m ANTI JOIN merged USING (run, leg, source, cut_id, plan_id, pass, key_group, block, applied)
WHERE NOT m.alone;

-- One row per dead row (deleted, left out by the filter, or excluded) of a cut, and plan under which it was read: its position
-- in its block, and the number of dead rows up to there. Only slices with dead rows are expanded into rows.
CREATE OR REPLACE VIEW dead_positions AS
WITH
read AS (
    SELECT cut_id, plan_id FROM cut_plans
    UNION
    SELECT cut_id, live_plan_id FROM live_plans
),
spans AS (
    SELECT plan_id, unit, unnest(dead) AS span
    FROM units
    WHERE live_rows < rows
),
clipped AS (
    SELECT
        s.*, r.plan_id AS live_plan_id,
        greatest(span.first, s.first_row) AS span_from,
        least(span.first + span.rows, s.first_row + s.rows) AS span_to
    FROM read AS r
    JOIN slices AS s USING (cut_id)
    -- Both plans have the same units: exclusions only add dead rows.
    JOIN spans ON spans.plan_id = r.plan_id AND spans.unit = s.unit
    WHERE s.live_rows < s.rows OR r.plan_id <> s.plan_id
),
dead_rows AS (
    SELECT *, base + unnest(range(span_from, span_to)) - first_row AS block_row
    FROM clipped
    WHERE span_from < span_to
),
placed AS (
    SELECT
        live_plan_id AS plan_id, cut_id, key_group, block, unit,
        -- The inverse of the permutation. DuckDB's % keeps the sign: + block_rows keeps it positive.
        (a_inv * ((block_row - c + block_rows) % block_rows)) % block_rows AS position
    FROM dead_rows
)
SELECT *, row_number() OVER (PARTITION BY plan_id, cut_id, key_group, block ORDER BY position) AS dead_upto
FROM placed;

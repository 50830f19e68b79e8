-- Where the dead rows (deleted, or left out by the filter) lie in their blocks, and how many lie up to there.
-- Only slices that have dead rows are spread out.
CREATE OR REPLACE VIEW dead_positions AS
WITH spans AS (
    SELECT plan_id, unit, unnest(dead) AS span
    FROM units
    WHERE live_rows < rows
),
clipped AS (
    SELECT
        s.*,
        greatest(span.first, s.first_row) AS span_from,
        least(span.first + span.rows, s.first_row + s.rows) AS span_to
    FROM slices AS s JOIN spans USING (plan_id, unit)
    WHERE s.live_rows < s.rows
),
dead_rows AS (
    SELECT *, base + unnest(range(span_from, span_to)) - first_row AS block_row
    FROM clipped
    WHERE span_from < span_to
),
placed AS (
    SELECT
        cut_id, key_group, block, unit,
        -- The inverse of the permutation. DuckDB's % keeps the sign: + block_rows keeps it positive.
        (a_inv * ((block_row - c + block_rows) % block_rows)) % block_rows AS position
    FROM dead_rows
)
SELECT *, row_number() OVER (PARTITION BY cut_id, key_group, block ORDER BY position) AS dead_upto
FROM placed;

-- One row per leg that a surviving lineage names, with the samples that a global batch takes from all key groups and from each.
CREATE OR REPLACE VIEW legs AS
SELECT
    run, leg, count(*) AS rows,
    any_value((detail->>'key_groups')::BIGINT) AS key_groups,
    any_value((detail->>'passes')::BIGINT) AS passes,
    any_value((detail->>'batch_size')::BIGINT) AS per_batch,
    any_value((detail->>'batch_size')::BIGINT // (detail->>'key_groups')::BIGINT) AS per_step
FROM consumption JOIN lineage USING (run, checkpoint_id, leg)
WHERE kind = 'leg'
GROUP BY run, leg;

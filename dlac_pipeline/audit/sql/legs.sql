-- One row per leg of a surviving lineage: the samples of a global batch from all key groups (per_batch) and from each
-- (per_step). In a counted leg a sample is a row. In a streamed leg (packing, transforms) only the advances count the rows of a
-- sample.
CREATE OR REPLACE VIEW legs AS
WITH named AS (
    SELECT c.* REPLACE (CASE WHEN json_valid(c.leg_json) THEN c.leg_json::JSON END AS leg_json)
    FROM consumption AS c JOIN lineage USING (run, checkpoint_id, leg)
    WHERE c.kind = 'leg'
),
sources AS (
    SELECT run, leg, seq, unnest(from_json(leg_json->'sources',
        '[{"active": "BOOLEAN", "follow": "VARCHAR", "transform": "VARCHAR"}]')) AS source
    FROM named
),
kinds AS (
    SELECT run, leg, seq, count(*) AS sources, count_if(source.active) AS active,
        count_if(source.follow = 'appends') > 0 AS following, count_if(source.transform <> '') > 0 AS transforms
    FROM sources
    GROUP BY run, leg, seq
)
SELECT
    n.run, n.leg, n.checkpoint_id, n.seq, n.step, count(*) OVER (PARTITION BY n.run, n.leg) AS rows,
    (n.leg_json->>'index')::BIGINT AS index,
    (n.leg_json->>'start_step')::BIGINT AS start_step,
    (n.leg_json->>'steps')::BIGINT AS steps,
    (n.leg_json->>'key_groups')::BIGINT AS key_groups,
    (n.leg_json->>'batch_size')::BIGINT AS per_batch,
    (n.leg_json->>'batch_size')::BIGINT // (n.leg_json->>'key_groups')::BIGINT AS per_step,
    coalesce((n.leg_json->'sequences'->>'length')::BIGINT, 0) > 0 OR coalesce(k.transforms, false) AS streamed,
    k.sources, k.active, k.following, n.leg_json
FROM named AS n LEFT JOIN kinds AS k USING (run, leg, seq);

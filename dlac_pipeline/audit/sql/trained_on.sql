-- One row per source of a run: what its model was trained on. Tokens are those of packed legs (NULL: the samples are rows).
WITH
steps AS (
    SELECT run, leg, sum(c.step - coalesce(c.parent_step, 0)) AS steps
    FROM (
        SELECT l.run, l.leg, l.step, p.step AS parent_step
        FROM lineage AS l LEFT JOIN lineage AS p ON p.run = l.run AND p.checkpoint_id = l.parent
    ) AS c
    GROUP BY ALL
),
sizes AS (
    SELECT l.run, sum(s.steps)::BIGINT AS steps, sum(s.steps * l.per_batch)::BIGINT AS samples,
        sum(s.steps * l.per_batch * nullif((l.leg_json->'sequences'->>'length')::BIGINT, 0))::BIGINT AS tokens
    FROM (FROM legs QUALIFY row_number() OVER (PARTITION BY run, leg ORDER BY seq DESC) = 1) AS l JOIN steps AS s USING (run, leg)
    GROUP BY l.run
),
bound AS (
    SELECT run, leg, seq, source, json_extract(leg_json, format('$.sources[{}]', source)) AS source_json
    FROM (SELECT run, leg, seq, leg_json, unnest(range(sources)) AS source FROM legs)
),
settings AS (
    SELECT run, source, arg_max(source_json->>'table', seq) AS source_table,
        list_sort(list_distinct(list(source_json->>'snapshot_id'))) AS snapshots,
        list_sort(list_distinct(flatten(list(from_json(source_json->'columns', '["VARCHAR"]'))))) AS columns,
        list_sort(list_distinct(flatten(list(from_json(source_json->'exclude', '["VARCHAR"]'))))) AS excluded,
        arg_max(source_json->>'row_filter', seq) AS row_filter, arg_max(source_json->>'transform', seq) AS transform
    FROM bound
    GROUP BY run, source
),
period AS (
    SELECT run, min(committed_at) AS since, max(committed_at) AS until FROM lineage GROUP BY run
)
SELECT s.name, g.source_table, g.snapshots, g.columns, g.row_filter, g.transform, g.excluded, s.passes_entered,
    s.rows, s.rows_consumed, s.rows_filtered, s.rows_quarantined,
    z.steps, z.samples, z.tokens, strftime(p.since, '%Y-%m-%d') AS since, strftime(p.until, '%Y-%m-%d') AS until
FROM sources AS s
JOIN settings AS g USING (run, source)
JOIN sizes AS z USING (run)
JOIN period AS p USING (run)
WHERE s.run = ?
ORDER BY s.source;

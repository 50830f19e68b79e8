-- One row per source of a run: what its model was trained on. tokens counts the places of packed sequences, padding included
-- (NULL: the samples are rows). An exclusion holds from since_step on.
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
    SELECT run, leg, seq, start_step, source, json_extract(leg_json, format('$.sources[{}]', source)) AS source_json
    FROM (SELECT run, leg, seq, start_step, leg_json, unnest(range(sources)) AS source FROM legs)
),
excluded AS (
    SELECT run, source, list({'where': clause, 'since_step': since_step} ORDER BY since_step, clause) AS excluded
    FROM (
        SELECT run, source, clause, min(start_step) + 1 AS since_step
        FROM (SELECT run, source, start_step, unnest(from_json(source_json->'exclude', '["VARCHAR"]')) AS clause FROM bound)
        GROUP BY ALL
    )
    GROUP BY run, source
),
settings AS (
    SELECT run, source, arg_max(source_json->>'table', seq) AS source_table,
        list_sort(list_distinct(list(source_json->>'snapshot_id'))) AS snapshots,
        list_sort(list_distinct(flatten(list(from_json(source_json->'columns', '["VARCHAR"]'))))) AS columns,
        arg_max(source_json->>'row_filter', seq) AS row_filter, arg_max(source_json->>'transform', seq) AS transform
    FROM bound
    GROUP BY run, source
),
period AS (
    SELECT run, min(committed_at) FILTER (kind = 'claim') AS since, max(committed_at) FILTER (kind = 'checkpoint') AS until
    FROM consumption
    GROUP BY run
)
SELECT s.name, g.source_table, g.snapshots, g.columns, g.row_filter, g.transform, coalesce(e.excluded, []) AS excluded,
    s.passes_entered, coalesce(s.rows_live, 0) AS rows_live, s.rows_consumed, s.rows_filtered, s.rows_quarantined,
    z.steps, z.samples, z.tokens, strftime(p.since AT TIME ZONE 'UTC', '%Y-%m-%d') AS since,
    strftime(p.until AT TIME ZONE 'UTC', '%Y-%m-%d') AS until
FROM sources AS s
JOIN settings AS g USING (run, source)
LEFT JOIN excluded AS e USING (run, source)
JOIN sizes AS z USING (run)
JOIN period AS p USING (run)
WHERE s.run = ?
ORDER BY s.source;

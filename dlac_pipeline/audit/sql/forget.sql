-- The state of a request to forget rows: forget_runs has its runs, and forget_problems what contradicts that it is met. There are
-- forget_request (one row: table_uuid, filters) and found_rows (file_path, row), which the statement of forget_summary creates again.

-- One row per row to forget, and plan of the table that has its place.
CREATE OR REPLACE TABLE forget_rows AS
SELECT DISTINCT u.plan_id, f.file_path, f.row
FROM found_rows AS f
JOIN units AS u ON u.file_path = f.file_path AND f.row >= u.first_row AND f.row < u.first_row + u.rows
JOIN plans AS p ON p.plan_id = u.plan_id
WHERE p.table_uuid = (SELECT table_uuid FROM forget_request);

-- One row per checkpoint: whether it has seen a row, whether it can be restored, and its place.
CREATE OR REPLACE TABLE forget_checkpoints AS
SELECT
    c.run, c.seq, c.checkpoint_id, c.step, c.committed_at, c.forked_run, c.forked_from, c.forked_step, c.model_digest, m.manifest_digest, a.checkpoint_id IS NOT NULL AS affected, coalesce(a.reads, false) AS reads,
    coalesce(len(c.losses), 0) > 0 AS has_losses,
    NOT EXISTS (FROM consumption AS o WHERE o.kind IN ('retire', 'quarantine') AND o.run = c.run
        AND o.checkpoint_id = c.checkpoint_id) AS restorable,
    l.checkpoint_id IS NOT NULL AS survives, coalesce(l.is_head, false) AS is_head,
    c.seq = min(c.seq) OVER (PARTITION BY c.run) AS is_first
FROM checkpoints AS c
JOIN consumption AS m ON m.kind = 'checkpoint' AND m.run = c.run AND m.checkpoint_id = c.checkpoint_id AND m.seq = c.seq
LEFT JOIN affected('forget_rows') AS a ON a.run = c.run AND a.checkpoint_id = c.checkpoint_id
LEFT JOIN lineage AS l ON l.run = c.run AND l.checkpoint_id = c.checkpoint_id;

-- One row per run and exclusion that its rewinds put in force. The rewind before a target's commit counts, too.
CREATE OR REPLACE VIEW forget_in_force AS
WITH RECURSIVE
aimed AS (
    SELECT r.run, r.seq, max(before.seq) AS before
    FROM rewinds AS r
    LEFT JOIN checkpoints AS c ON c.run = r.run AND c.checkpoint_id = r.checkpoint_id
    LEFT JOIN rewinds AS before ON before.run = r.run AND before.seq < c.seq
    GROUP BY r.run, r.seq
),
walk AS (
    SELECT run, max(seq) AS seq FROM rewinds GROUP BY run
    UNION
    SELECT a.run, a.before FROM walk JOIN aimed AS a USING (run, seq) WHERE a.before IS NOT NULL
)
SELECT DISTINCT run, excluded.source AS source, excluded."where" AS "where"
FROM (SELECT run, unnest(r.excluded) AS excluded FROM walk JOIN rewinds AS r USING (run, seq));

-- One row per run that will read a row, unless it is finished or excludes the rows. The leg of its head decides, or without a
-- head its first one, with which it begins again. The plans of its last claim count without a head, too. A source that follows
-- its table will read a row that no plan of the surviving lineage has. A run whose head is retired reads nothing more.
CREATE OR REPLACE VIEW forget_readers AS
WITH
claims AS (
    SELECT run, arg_max(claim, seq) AS claim FROM consumption WHERE kind = 'claim' GROUP BY run
    -- An adoption or a fork that was killed has trained nothing, and has no weights. Repeated, it claims the run again.
    HAVING coalesce(arg_max(claim, seq).purpose, 'trains') NOT IN ('adopts', 'forks')
),
bound AS (
    SELECT l.run, g.leg_json FROM lineage AS l JOIN legs AS g ON g.run = l.run AND g.leg = l.leg WHERE l.is_head
    UNION
    SELECT run, arg_min(leg_json, seq)::JSON FROM consumption
    WHERE kind = 'leg' AND run NOT IN (SELECT run FROM lineage)
    GROUP BY run
),
bound_sources AS (
    SELECT run, source, json_extract(leg_json, format('$.sources[{}]', source)) AS source_json
    FROM (SELECT run, leg_json, unnest(range(json_array_length(leg_json -> '$.sources')::BIGINT)) AS source FROM bound)
),
upcoming AS (
    SELECT l.run, c.source, c.live_plan_id AS plan_id
    FROM lineage AS l JOIN leg_cuts AS c ON c.run = l.run AND c.leg = l.leg
    WHERE l.is_head
    UNION
    SELECT run, source, unnest(from_json(source_json -> '$.start.upcoming', '[["VARCHAR"]]'))[1]
    FROM bound_sources
    WHERE run NOT IN (SELECT run FROM lineage)
    UNION
    SELECT run, NULL, unnest(coalesce(claim.leg_plan_ids, claim.plan_ids))
    FROM claims
    WHERE run NOT IN (SELECT run FROM lineage)
),
unplanned AS (
    SELECT b.run, b.source
    FROM bound_sources AS b, forget_rows AS f
    WHERE b.source_json ->> '$.follow' = 'appends' AND b.source_json ->> '$.table_uuid' = (SELECT table_uuid FROM forget_request)
    GROUP BY b.run, b.source, f.file_path, f.row
    HAVING NOT bool_or((b.run, b.source, f.plan_id) IN (SELECT run, source, plan_id FROM leg_cuts))
),
reading AS (
    SELECT DISTINCT u.run, u.source
    FROM (
        SELECT u.run, u.source FROM upcoming AS u JOIN live_places('forget_rows') AS p USING (plan_id)
        UNION
        FROM unplanned
    ) AS u
    WHERE u.run NOT IN (SELECT run FROM finishes)
        AND u.run NOT IN (SELECT run FROM forget_checkpoints WHERE is_head AND NOT restorable)
)
SELECT DISTINCT r.run
FROM reading AS r, (SELECT unnest(filters) AS "where" FROM forget_request) AS f
WHERE NOT EXISTS (FROM forget_in_force AS e
    WHERE e.run = r.run AND e."where" = f."where" AND e.source = coalesce(r.source, e.source));

-- One row per run that has seen a row, will read one, or excludes them: what was seen, the action, and its cost. Hours are wall
-- time, with the time in which nothing ran. A fork whose first checkpoint has seen a row begins again from clean_parent.
CREATE OR REPLACE TABLE forget_runs AS
WITH
counted AS (
    SELECT
        run,
        count_if(affected) AS affected_checkpoints,
        arg_min(checkpoint_id, seq) FILTER (affected) AS first_affected,
        arg_min(step, seq) FILTER (affected) AS first_affected_step,
        count_if(affected AND survives AND restorable) AS surviving,
        count_if(affected AND NOT survives AND restorable) AS abandoned,
        count_if(affected AND NOT restorable) AS retired,
        max(checkpoint_id) FILTER (is_head) AS head,
        coalesce(max(step) FILTER (is_head), 0) AS head_step,
        max(model_digest) FILTER (is_head) AS head_model_digest,
        max(manifest_digest) FILTER (is_head) AS head_manifest_digest,
        max(committed_at) FILTER (is_head) AS head_at,
        coalesce(bool_or(affected) FILTER (is_head), false) AS head_affected,
        bool_or(restorable) AS restorable,
        arg_max(checkpoint_id, seq) FILTER (survives AND restorable AND NOT affected) AS clean_checkpoint,
        coalesce(arg_max(step, seq) FILTER (survives AND restorable AND NOT affected), 0) AS clean_step,
        arg_max(committed_at, seq) FILTER (survives AND restorable AND NOT affected) AS clean_at,
        bool_or(affected) FILTER (is_first) AS first_is_affected,
        min(step) FILTER (is_first) > 0 AS has_beginning,
        max(forked_run) FILTER (is_first) AS forked_run,
        max(forked_from) FILTER (is_first) AS forked_from,
        max(forked_step) FILTER (is_first) AS forked_step
    FROM forget_checkpoints
    GROUP BY run
),
runs AS (
    SELECT run, min(committed_at) AS started_at FROM consumption GROUP BY run
),
sizes AS (
    SELECT l.run, any_value(g.per_batch) AS per_batch, any_value((g.leg_json -> 'sequences' ->> 'length')::BIGINT) AS length
    FROM lineage AS l JOIN legs AS g ON g.run = l.run AND g.leg = l.leg
    WHERE l.is_head
    GROUP BY l.run
),
facts AS (
    SELECT
        r.run, r.started_at, c.* EXCLUDE (run), s.per_batch, s.length,
        r.run IN (FROM forget_readers) AS will_read,
        r.run IN (SELECT run FROM finishes) AS finished,
        EXISTS (FROM forget_in_force AS e
            WHERE e.run = r.run AND list_contains((SELECT filters FROM forget_request), e."where")) AS excludes
    FROM runs AS r LEFT JOIN counted AS c ON c.run = r.run LEFT JOIN sizes AS s ON s.run = r.run
),
judged AS (
    SELECT
        *,
        CASE
            WHEN restorable IS NULL THEN CASE WHEN will_read THEN 'begin again' ELSE 'none' END
            WHEN NOT restorable AND NOT will_read THEN 'none'
            WHEN head_affected AND clean_checkpoint IS NULL AND NOT has_beginning AND first_is_affected AND forked_run IS NOT NULL
                THEN 'fork again'
            WHEN head_affected AND clean_checkpoint IS NULL AND NOT has_beginning THEN 'begin again'
            WHEN head_affected OR will_read THEN 'rewind'
            WHEN surviving + abandoned > 0 THEN 'retire'
            ELSE 'none'
        END AS action
    FROM facts
),
costed AS (
    SELECT
        *,
        CASE WHEN action = 'rewind' THEN head_step - clean_step WHEN action LIKE '%again' THEN coalesce(head_step, 0) ELSE 0 END
            AS steps_to_replay,
        epoch(head_at - started_at) / 3600 AS trained_hours,
        CASE WHEN action = 'rewind' THEN epoch(head_at - coalesce(clean_at, started_at)) / 3600
            WHEN action LIKE '%again' THEN trained_hours ELSE 0 END AS hours_to_replay
    FROM judged
    WHERE affected_checkpoints > 0 OR will_read OR excludes
)
SELECT
    c.run, (SELECT max(o.seq) FROM consumption AS o WHERE o.run = c.run) AS seq, action, finished, will_read,
    coalesce(affected_checkpoints, 0) AS affected_checkpoints, first_affected, first_affected_step, coalesce(surviving, 0) AS surviving,
    coalesce(abandoned, 0) AS abandoned, coalesce(retired, 0) AS retired, head, head_step, head_model_digest,
    head_manifest_digest,
    (
        SELECT list(f.checkpoint_id ORDER BY f.seq) FROM forget_checkpoints AS f WHERE f.run = c.run AND f.affected
    ) AS affected,
    CASE WHEN action = 'rewind' THEN clean_checkpoint END AS clean_checkpoint,
    CASE WHEN action = 'rewind' THEN clean_step END AS clean_step,
    CASE
        WHEN action = 'fork again' THEN format(
            'dlac fork {} --checkpoint {} --as NEW --spec JOB.toml, this command with --execute, dlac checkpoint retire {} --whole-run',
            forked_run,
            coalesce((
                SELECT arg_max(p.checkpoint_id, p.seq)
                FROM forget_checkpoints AS p
                WHERE p.run = c.forked_run AND p.restorable AND NOT p.affected AND p.step <= c.forked_step
            ), '(none yet)'),
            c.run)
        WHEN action = 'begin again' AND restorable THEN
            format('dlac train with another name and the filters in exclude, dlac checkpoint retire {} --whole-run', c.run)
        WHEN action = 'begin again' THEN 'write the filters into exclude of its job file, '
            || 'train it to a checkpoint by dlac train --new-leg, and repeat this'
    END AS commands,
    steps_to_replay, steps_to_replay * per_batch AS samples_to_replay,
    CASE WHEN length > 0 THEN steps_to_replay * per_batch * length END AS tokens_to_replay,
    round(hours_to_replay, 4) AS hours_to_replay,
    round(steps_to_replay / nullif(head_step, 0), 4) AS share_of_retraining,
    CASE WHEN NOT finished AND steps_to_replay > 0 THEN round(head_step / nullif(trained_hours, 0)) END AS later_steps_per_hour,
    (
        SELECT list(n.name ORDER BY n.name)
        FROM (SELECT run, name, arg_max_null(checkpoint_id, seq) AS checkpoint_id
            FROM consumption WHERE kind = 'name' GROUP BY ALL) AS n
        JOIN forget_checkpoints AS f ON f.run = n.run AND f.checkpoint_id = n.checkpoint_id
        WHERE n.run = c.run AND f.affected AND f.restorable
    ) AS tags,
    (
        SELECT list(format('{} of {}, BLAKE3 {}', e.file, e.checkpoint_id, e.file_digest) ORDER BY e.exported_at)
        FROM exports AS e JOIN forget_checkpoints AS f ON f.run = e.run AND f.checkpoint_id = e.checkpoint_id
        WHERE e.run = c.run AND f.affected
    ) AS exports_to_delete_or_replace,
    (
        SELECT list(f.checkpoint_id ORDER BY f.seq)
        FROM forget_checkpoints AS f
        WHERE f.run = c.run AND f.reads AND f.has_losses
    ) AS losses_of_checkpoints,
    (
        SELECT list({'seq': r.seq, 'checkpoint_id': r.checkpoint_id, 'nonce': r.nonce} ORDER BY r.seq)
        FROM consumption AS r
        WHERE r.kind = 'rewind' AND r.run = c.run
            AND EXISTS (FROM forget_request WHERE list_has_any(filters, [e."where" FOR e IN r.rewind.exclude]))
    ) AS filters_in_rewinds
FROM costed AS c
ORDER BY c.run;

-- One row per contradiction: no row if no checkpoint that has seen a row can be restored, and no run will read one. Of a
-- checkpoint of a run that lacks appends, or whose origin is lost, it is unknown.
CREATE OR REPLACE VIEW forget_problems AS
SELECT run, 'expected no restorable checkpoint that has seen the rows, found ' || string_agg(checkpoint_id, ', ' ORDER BY seq)
    AS problem
FROM forget_checkpoints
WHERE affected AND restorable
GROUP BY run
UNION ALL
SELECT h.run, 'expected a head that has not seen the rows, found ' || h.checkpoint_id
FROM forget_checkpoints AS h
WHERE h.is_head AND h.affected
    AND EXISTS (FROM forget_checkpoints AS o WHERE o.run = h.run AND o.restorable AND NOT o.affected)
UNION ALL
SELECT run, 'expected the rows to be excluded, found that the next steps would read them'
FROM forget_readers
UNION ALL
SELECT l.run, format('expected all {} appends in the ledger, found {}: run dlac ledger rebuild, or dlac checkpoint retire {} --whole-run',
    l.last_seq, l.found, l.run)
FROM lost_appends AS l
WHERE l.run NOT IN (SELECT run FROM forget_checkpoints GROUP BY run HAVING NOT bool_or(restorable))
UNION ALL
SELECT run, format('expected checkpoint {} of run {} in the ledger, from which it was forked, found none: run dlac ledger rebuild, '
    || 'or dlac checkpoint retire {} --whole-run', any_value(forked_from), any_value(forked_run), run)
FROM forget_checkpoints
WHERE forked_from IS NOT NULL AND forked_from NOT IN (SELECT checkpoint_id FROM forget_checkpoints)
GROUP BY run
HAVING bool_or(restorable)
ORDER BY ALL;

-- One row: the number of rows, their digest, and the rows themselves if they are few. The statement creates forget_request and
-- found_rows in another DuckDB.
CREATE OR REPLACE VIEW forget_summary AS
WITH
numbered AS (
    SELECT file_path, row, row - row_number() OVER (PARTITION BY file_path ORDER BY row) AS range FROM found_rows
),
ranges AS (
    SELECT format('(''{}'', {}, {})', replace(file_path, '''', ''''''), min(row), max(row)) AS literal
    FROM numbered
    GROUP BY file_path, range
),
filters AS (
    SELECT string_agg('''' || replace(each, '''', '''''') || '''', ', ') AS literals
    FROM (SELECT unnest(filters) AS each FROM forget_request)
)
SELECT
    count(*) AS count, count(DISTINCT file_path) AS files,
    sha256(coalesce(string_agg(file_path || chr(9) || row, chr(10) ORDER BY file_path, row), '')) AS sha256,
    CASE WHEN count(*) <= 10000 THEN list([file_path, row::VARCHAR] ORDER BY file_path, row) END AS listed,
    format(
        'CREATE OR REPLACE TABLE forget_request AS SELECT ''{}'' AS table_uuid, [{}] AS filters;' || chr(10)
        || 'CREATE OR REPLACE TABLE found_rows AS SELECT file_path, unnest(range(first, last + 1)) AS row' || chr(10)
        || 'FROM (VALUES {}) AS ranges (file_path, first, last);' || chr(10),
        (SELECT table_uuid FROM forget_request), (SELECT literals FROM filters),
        (SELECT string_agg(literal, ', ' ORDER BY literal) FROM ranges)) AS statement
FROM found_rows;

-- One row per run and kind of problem in its legs, as a sentence. A sound run has none. The legs must follow each other, and
-- the advances must belong to the cuts and plans that the legs name.
CREATE OR REPLACE VIEW leg_problems AS
WITH
chain AS MATERIALIZED (FROM lineage),
named AS (
    SELECT c.run, c.leg, min(c.seq) AS first_seq, coalesce(any_value(l.rows), 0) AS rows
    FROM chain AS c LEFT JOIN legs AS l USING (run, leg)
    GROUP BY c.run, c.leg
),
begun AS (
    SELECT l.*, c.seq AS checkpoint_seq, coalesce(p.step, 0) AS parent_step, n.first_seq
    FROM legs AS l
    JOIN chain AS c ON c.run = l.run AND c.checkpoint_id = l.checkpoint_id
    JOIN named AS n ON n.run = l.run AND n.leg = l.leg
    LEFT JOIN chain AS p ON p.run = c.run AND p.checkpoint_id = c.parent
),
turned AS (
    SELECT run, seq, leg, step, lag(leg) OVER (PARTITION BY run ORDER BY seq) AS leg_before FROM chain
),
cursors AS (
    SELECT run, leg, source, seq, unnest(range(len(cursors))) AS key_group, unnest(cursors) AS cursor FROM leg_sources
),
reached AS (
    SELECT c.*, coalesce(arg_max(
        [a.pass, a.block, a.read_to, coalesce(a.token_end, 0)],
        {'pass': a.pass, 'block': a.block, 'position': a.read_to, 'token': coalesce(a.token_end, 0)}
    ) FILTER (a.run IS NOT NULL), [0, 0, 0, 0]) AS place
    FROM cursors AS c LEFT JOIN advances AS a
        ON a.run = c.run AND a.source = c.source AND a.key_group = c.key_group AND a.seq < c.seq
    GROUP BY ALL
),
read AS (
    SELECT DISTINCT run, leg, source, pass, cut_id, plan_id FROM advances
),
bound AS (
    SELECT r.*, p.plan_id AS plan_cut, p.live_plan_id, s.plan_id AS plan_of_slices
    FROM read AS r
    LEFT JOIN live_plans AS p USING (run, leg, source, pass, cut_id)
    LEFT JOIN (SELECT DISTINCT cut_id, plan_id FROM slices) AS s USING (cut_id)
),
-- A pass is due if it or a later one was entered, or if the run has finished and the source had to have it. The last leg that
-- names a due pass gives its plan. A pass over a plan whose units have no live rows is never entered.
due AS (
    SELECT run, source, unnest(range(max(pass) + 1)) AS pass FROM cuts GROUP BY run, source
    UNION
    SELECT run, source, unnest(range(passes)) FROM complete_sources
),
unentered AS (
    SELECT d.run, d.source, d.pass, arg_max(l.live_plan_id, l.leg) AS plan_id
    FROM due AS d
    ANTI JOIN cuts USING (run, source, pass)
    LEFT JOIN leg_cuts AS l
        ON l.run = d.run AND l.source = d.source AND d.pass BETWEEN l.first_pass AND coalesce(l.last_pass, d.pass)
    GROUP BY ALL
),
skipped AS (
    SELECT run, source, pass
    FROM unentered
    WHERE plan_id IS NULL OR plan_id NOT IN (SELECT plan_id FROM plans WHERE live_rows = 0) OR EXISTS (
        FROM units AS u
        WHERE u.plan_id = unentered.plan_id AND coalesce(list_sum([span.rows FOR span IN u.dead]), 0) < u.rows
    )
),
queued AS (
    SELECT run, leg, source, name, passes, next_pass,
        next_pass + list_sum(list_transform(upcoming, lambda item: item[2]::BIGINT)) AS passes_named
    FROM leg_sources
    WHERE follow <> 'appends' AND passes > 0
),
ends AS (
    SELECT l.*, c.step AS head_step
    FROM legs AS l JOIN chain AS c ON c.run = l.run AND c.leg = l.leg AND c.is_head
    WHERE l.run IN (SELECT run FROM finishes)
),
found AS (
    SELECT run, 'row' AS kind, format('expected one row of leg {} on the surviving lineage, found {}', leg, rows) AS problem
    FROM named
    WHERE rows <> 1
    UNION ALL
    SELECT run, 'turn', format('expected leg {} or {} at step {}, found leg {}', leg_before, leg_before + 1, step, leg)
    FROM turned
    WHERE leg NOT BETWEEN coalesce(leg_before, leg) AND coalesce(leg_before + 1, leg)
    UNION ALL
    SELECT run, 'begin', format('expected leg {} to begin at step {}, that of the checkpoint before its first, found leg {} '
        || 'from step {}, in its checkpoint with seq {}',
        leg, parent_step, or_nothing(index), or_nothing(start_step), checkpoint_seq)
    FROM begun
    WHERE index IS DISTINCT FROM leg OR start_step IS DISTINCT FROM parent_step OR step IS DISTINCT FROM start_step
        OR checkpoint_seq <> first_seq
    UNION ALL
    SELECT run, 'settings', format('expected legs that can be read, with key groups that divide the batch, found {} key groups '
        || 'and batches of {} in leg {}', or_nothing(key_groups), or_nothing(per_batch), leg)
    FROM legs
    WHERE NOT coalesce(per_step > 0 AND per_step * key_groups = per_batch AND sources > 0, false)
    UNION ALL
    SELECT run, 'key groups', format('expected one number of key groups in all legs, found {} to {}',
        min(key_groups), max(key_groups))
    FROM legs
    GROUP BY run
    HAVING min(key_groups) <> max(key_groups)
    UNION ALL
    SELECT run, 'cursor', format('expected source {}, key group {} at {} where leg {} begins, found {}',
        source, key_group, place, leg, or_nothing(cursor))
    FROM reached
    -- A row that was read in part and is excluded now is skipped.
    WHERE cursor IS DISTINCT FROM place
        AND NOT coalesce(place[4] > 0 AND cursor = [place[1], place[2], place[3] + 1, 0], false)
    UNION ALL
    SELECT run, 'plan', format('cut {}: expected plan {}, cut from {}, in pass {} of source {} in leg {}, found {}, cut from {}',
        cut_id, or_nothing(live_plan_id), or_nothing(plan_cut), pass, source, leg,
        or_nothing(plan_id), or_nothing(plan_of_slices))
    FROM bound
    WHERE plan_id IS DISTINCT FROM live_plan_id
        OR (plan_of_slices IS NOT NULL AND plan_of_slices IS DISTINCT FROM plan_cut)
    UNION ALL
    SELECT run, 'double cut', format('expected one cut of pass {} of source {}, found {}', pass, source, count(*))
    FROM cuts
    GROUP BY run, source, pass
    HAVING count(*) > 1
    UNION ALL
    SELECT run, 'passes', format('expected all passes of source {} up to the last one, found no advance in pass {}', source, pass)
    FROM skipped
    SEMI JOIN cuts ON cuts.run = skipped.run AND cuts.source = skipped.source AND cuts.pass > skipped.pass
    UNION ALL
    SELECT run, 'queue', format('expected {} passes over {} in leg {}, found {} before it and {} to come',
        passes, name, leg, next_pass, passes_named - next_pass)
    FROM queued
    WHERE coalesce(passes_named, next_pass) <> greatest(passes, next_pass)
    UNION ALL
    SELECT s.run, 'finish', format('expected the run to finish after {} passes of {}, found {}', s.passes, s.name,
        coalesce(c.passes, 0))
    FROM complete_sources AS s
    LEFT JOIN (SELECT run, source, max(pass) + 1 AS passes FROM cuts GROUP BY run, source) AS c USING (run, source)
    SEMI JOIN skipped AS k ON k.run = s.run AND k.source = s.source AND k.pass >= coalesce(c.passes, 0)
    UNION ALL
    SELECT run, 'steps', format('expected the run to finish at step {}, found step {}', or_nothing(steps), head_step)
    FROM ends
    WHERE head_step > steps OR (run NOT IN (SELECT run FROM complete_sources) AND head_step IS DISTINCT FROM steps)
)
SELECT run, min(problem) || CASE WHEN count(*) > 1 THEN format(' (and {} more like it)', count(*) - 1) ELSE '' END AS problem
FROM found
GROUP BY run, kind;

-- One row per branch of a run: a sequence of checkpoints, each the parent of the next. It grew from checkpoint grew_from at
-- step from_step (NULL: from the beginning), of another run if it was forked. begun_by: start, adoption, fork, rewind or
-- quarantine. surviving: head_checkpoint is on the surviving lineage. If it is not, those up to step survives_to are (NULL:
-- none). The branch that a rewind begins has no checkpoint until one is committed.
CREATE OR REPLACE VIEW branches AS
WITH
members AS (
    SELECT b.run, b.branch, b.branch_parent, b.parent_run, c.checkpoint_id, c.step, c.seq, c.adopted, c.forked_step,
        l.checkpoint_id IS NOT NULL AS survives
    FROM branch_checkpoints AS b
    JOIN checkpoints AS c ON c.run = b.run AND c.checkpoint_id = b.checkpoint_id AND c.seq = b.seq
    LEFT JOIN lineage AS l ON l.run = c.run AND l.checkpoint_id = c.checkpoint_id AND l.seq = c.seq
),
grown AS (
    SELECT run, branch, any_value(branch_parent) AS grew_from, any_value(parent_run) AS parent_run,
        any_value(forked_step) AS forked_step, any_value(adopted) AS adopted,
        arg_max(checkpoint_id, seq) AS head_checkpoint, count(*) AS checkpoints,
        min(step) AS first_step, max(step) AS last_step, min(seq) AS first_seq, max(seq) AS last_seq,
        arg_max(survives, seq) AS surviving, max(step) FILTER (survives) AS survives_to
    FROM members
    GROUP BY run, branch
),
placed AS (
    SELECT *, coalesce(lag(last_seq) OVER (PARTITION BY run ORDER BY branch), 0) AS seq_before FROM grown
),
-- The last rewind begins a branch even if nothing was committed after it. A rewind to the head itself begins none: it only
-- excludes rows.
newest AS (
    FROM grown QUALIFY row_number() OVER (PARTITION BY run ORDER BY branch DESC) = 1
),
open_rewinds AS (
    SELECT r.*, g.branch + 1 AS branch, g.head_checkpoint
    FROM rewinds AS r JOIN newest AS g ON g.run = r.run AND r.seq > g.last_seq
    QUALIFY row_number() OVER (PARTITION BY r.run ORDER BY r.seq DESC) = 1
),
opened AS (
    SELECT p.run, p.branch, arg_max(r.why, r.seq) AS why, count(r.run) > 0 AS by_rewind
    FROM placed AS p LEFT JOIN rewinds AS r ON r.run = p.run AND r.seq > p.seq_before AND r.seq < p.first_seq
    GROUP BY p.run, p.branch
)
SELECT
    p.run, p.branch,
    CASE
        WHEN p.adopted IS NOT NULL THEN 'adoption'
        WHEN p.parent_run <> p.run THEN 'fork'
        WHEN o.by_rewind THEN 'rewind'
        WHEN p.grew_from IS NULL AND p.seq_before = 0 THEN 'start'
        ELSE 'quarantine'
    END AS begun_by,
    p.grew_from, coalesce(p.forked_step, c.step) AS from_step,
    p.head_checkpoint, p.first_step, p.last_step, p.checkpoints, p.surviving, p.survives_to, o.why
FROM placed AS p
JOIN opened AS o USING (run, branch)
LEFT JOIN checkpoints AS c ON c.run = p.run AND c.checkpoint_id = p.grew_from
UNION ALL
SELECT run, branch, 'rewind', checkpoint_id, CASE WHEN checkpoint_id IS NOT NULL THEN step END, checkpoint_id, NULL, NULL, 0, true,
    NULL, why
FROM open_rewinds
WHERE checkpoint_id IS DISTINCT FROM head_checkpoint
ORDER BY run, branch;

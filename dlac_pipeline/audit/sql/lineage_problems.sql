-- Whether a run's rows make one unbroken chain of checkpoints. One sentence per problem; none where all is well.
CREATE OR REPLACE VIEW lineage_problems AS
WITH
chain AS MATERIALIZED (FROM lineage),
appends AS (
    SELECT run, seq, any_value(head_after) AS head_after, count(DISTINCT coalesce(head_after, '')) AS heads
    FROM consumption
    GROUP BY run, seq
),
heads AS (
    SELECT run, max(seq) AS last_seq, arg_max_null(head_after, seq) AS head, count(*) AS appends, min(seq) AS first_seq
    FROM appends
    GROUP BY run
),
numbers AS (
    SELECT run, plan_id, min(pass) AS first_pass, max(pass) AS last_pass, count(DISTINCT pass) AS passes
    FROM advances
    GROUP BY run, plan_id
),
named AS (
    SELECT c.run, c.leg, coalesce(any_value(l.rows), 0) AS rows
    FROM chain AS c LEFT JOIN legs AS l USING (run, leg)
    GROUP BY c.run, c.leg
)
SELECT run, format('expected one append per seq from 1 to {}, found {} from {}', last_seq, appends, first_seq) AS problem
FROM heads
WHERE first_seq <> 1 OR appends <> last_seq
UNION ALL
SELECT run, format('expected all rows of seq {} to name one head, found {}', seq, heads) FROM appends WHERE heads <> 1
UNION ALL
SELECT run, format('expected the head {} among the checkpoints, found no such checkpoint', head) FROM heads
WHERE head IS NOT NULL AND head NOT IN (SELECT checkpoint_id FROM checkpoints)
UNION ALL
SELECT run, format('expected one row of checkpoint {}, found {}', checkpoint_id, count(*)) FROM checkpoints
GROUP BY run, checkpoint_id
HAVING count(*) > 1
UNION ALL
SELECT c.run, format('expected the parent {} of checkpoint {} before it in the ledger, found none', c.parent, c.checkpoint_id)
FROM chain AS c ANTI JOIN chain AS p ON p.run = c.run AND p.checkpoint_id = c.parent
WHERE c.parent IS NOT NULL
UNION ALL
SELECT c.run, format('expected {} steps from checkpoint {} to {}, found {} applied and {} skipped',
    c.step - coalesce(p.step, 0), coalesce(c.parent, 'the beginning'), c.checkpoint_id,
    said(c.applied_steps), said(c.skipped_steps))
FROM chain AS c LEFT JOIN chain AS p ON p.run = c.run AND p.checkpoint_id = c.parent
WHERE c.step <= coalesce(p.step, 0) OR c.applied_steps + c.skipped_steps IS DISTINCT FROM c.step - coalesce(p.step, 0)
UNION ALL
SELECT run, format('expected passes 0 to {} of plan {}, found {} passes from {}', last_pass, plan_id, passes, first_pass)
FROM numbers
WHERE first_pass <> 0 OR passes <> last_pass + 1
UNION ALL
SELECT run, format('expected one row of leg {} on the surviving lineage, found {}', leg, rows) FROM named WHERE rows <> 1
UNION ALL
SELECT run, format('expected advances of checkpoint {}, found none', checkpoint_id)
FROM chain ANTI JOIN advances USING (run, checkpoint_id)
UNION ALL
SELECT l.run, format('expected the run to finish after {} passes of leg {}, found {}', l.passes, l.leg, coalesce(n.passes, 0))
FROM legs AS l
JOIN chain AS c ON c.run = l.run AND c.leg = l.leg AND c.is_head
LEFT JOIN numbers AS n ON n.run = c.run AND n.plan_id = c.plan_id
WHERE l.run IN (SELECT run FROM consumption WHERE kind = 'finish') AND l.passes <> coalesce(n.passes, 0)
UNION ALL
SELECT f.run, format('expected the run to finish at step {}, that of its head, found step {}',
    coalesce(c.step, 0), said(f.step))
FROM consumption AS f LEFT JOIN chain AS c ON c.run = f.run AND c.is_head
WHERE f.kind = 'finish' AND f.step IS DISTINCT FROM coalesce(c.step, 0);

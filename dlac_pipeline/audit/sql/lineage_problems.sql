-- One row per problem in the chain of checkpoints of a run, as a sentence. A sound run has none.
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
-- Checkpoints without a step of their own: one that was adopted or forked, or that only records a new leg, without a batch.
unmoved AS (
    SELECT c.run, c.checkpoint_id
    FROM chain AS c LEFT JOIN chain AS p ON p.run = c.run AND p.checkpoint_id = c.parent
    WHERE c.step = coalesce(p.step, 0) AND (
        (coalesce(c.adopted, c.forked_from) IS NOT NULL AND c.parent IS NULL)
        OR (c.leg IS DISTINCT FROM p.leg
            AND EXISTS (FROM legs AS l WHERE l.run = c.run AND l.leg = c.leg AND l.checkpoint_id = c.checkpoint_id))
    )
),
-- Finished runs without a checkpoint, with the live rows of the largest plan that they were launched for.
unread AS (
    SELECT f.run, max(plans.live_rows) AS live_rows
    FROM finishes AS f ANTI JOIN chain USING (run)
    JOIN (
        SELECT run, unnest(claim.plan_ids) AS plan_id FROM consumption WHERE kind = 'claim'
    ) AS c USING (run)
    JOIN plans USING (plan_id)
    GROUP BY f.run
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
    or_nothing(c.applied_steps), or_nothing(c.skipped_steps))
FROM chain AS c LEFT JOIN chain AS p ON p.run = c.run AND p.checkpoint_id = c.parent
WHERE (c.step <= coalesce(p.step, 0) AND (c.run, c.checkpoint_id) NOT IN (FROM unmoved))
    OR c.applied_steps + c.skipped_steps IS DISTINCT FROM c.step - coalesce(p.step, 0)
UNION ALL
SELECT run, format('expected advances of checkpoint {}, found none', checkpoint_id)
FROM chain ANTI JOIN advances USING (run, checkpoint_id) ANTI JOIN replays USING (run, checkpoint_id)
ANTI JOIN audited USING (checkpoint_id)
WHERE (run, checkpoint_id) NOT IN (FROM unmoved)
UNION ALL
SELECT f.run, format('expected the run to finish at step {}, that of its head, found step {}',
    coalesce(c.step, 0), or_nothing(f.step))
FROM finishes AS f LEFT JOIN chain AS c ON c.run = f.run AND c.is_head
WHERE f.step IS DISTINCT FROM coalesce(c.step, 0)
UNION ALL
SELECT run, format('expected a checkpoint of a run that finished, found none, and {} live rows in the plan of its launch',
    live_rows)
FROM unread
WHERE live_rows > 0;

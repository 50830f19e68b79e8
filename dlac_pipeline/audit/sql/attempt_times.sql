-- One row per attempt: its time from its claim (from_at) to the next one, or to the last sign of life of the run (to_at), by
-- cause in seconds. The causes of an attempt add up to its time. Signs of life are claims, checkpoints, finishes, recorded
-- failures, and first steps after recoveries.
--   trained_s        steps of checkpoints on the surviving lineage
--   abandoned_s      steps of other checkpoints, which a rewind or a quarantine abandoned
--   replayed_s       from the last checkpoint of an attempt, or the state that it left in memory, to its failure
--   checkpointing_s  training waited for a checkpoint, or for the end of the run
--   down_s           from a failure to the first step of the attempt that recovers
--   startup_s        from the claim of any other attempt to its first step. It is measured if the attempt failed before a
--                    checkpoint that is kept. Otherwise the steps of its first checkpoint count as long as its later steps
--                    take, or else those of the run
--   idle_s           after an attempt that ended on request, or that trains nothing (it rewinds, forks or adopts)
--   unknown_s        the rest: an attempt has no recorded end, or no later step shows how long its first steps took
CREATE OR REPLACE VIEW attempt_times AS
WITH
-- Rows of one run come from several nodes: seq orders them, and a clock that is behind does not turn time back.
signs AS (
    SELECT run, seq, kind, attempt, checkpoint_id, parent, step, head_after, claim, reason,
        max(epoch_us(committed_at)) OVER (PARTITION BY run ORDER BY seq) AS at_us
    FROM consumption
    WHERE kind IN ('claim', 'checkpoint', 'finish')
),
-- States that attempts left in memory, as the first claim that resumed from them records: checkpoints that took no time.
remembered AS (
    SELECT c.run, c.claim.memory_of AS attempt, c.seq,
        c.claim.memory_step - coalesce(h.step, 0) AS steps,
        (count(l.checkpoint_id) > 0 OR count(n.seq) = 0) AND NOT EXISTS (
            -- an attempt that read the store after all
            FROM signs AS m
            WHERE m.run = c.run AND m.kind = 'claim' AND m.seq > c.seq AND m.claim.memory_of = 0
                AND m.seq < (SELECT min(seq) FROM signs AS k WHERE k.run = c.run AND k.kind = 'checkpoint' AND k.seq > c.seq)
        ) AS survives, false AS exits, false AS rescales,
        (1e6 * c.claim.memory_at)::BIGINT AS copied_us, copied_us AS begun_us, copied_us AS done_us
    FROM signs AS c
    LEFT JOIN signs AS h ON h.run = c.run AND h.kind = 'checkpoint' AND h.checkpoint_id = c.head_after
    LEFT JOIN signs AS n ON n.run = c.run AND n.kind = 'checkpoint' AND n.seq > c.seq
    LEFT JOIN lineage AS l ON l.run = c.run AND l.checkpoint_id = n.checkpoint_id
    WHERE c.kind = 'claim' AND c.claim.memory_of > 0
    GROUP BY c.run, c.attempt, c.seq, c.claim, h.step
    QUALIFY row_number() OVER (PARTITION BY c.run, c.claim.memory_of ORDER BY c.seq) = 1
),
taken AS (
    SELECT c.run, c.attempt, c.seq, c.step - coalesce(p.step, 0) AS steps, l.checkpoint_id IS NOT NULL AS survives,
        coalesce(c.reason IN ('end', 'left', 'nodes', 'SIGTERM', 'SIGUSR1', 'termination_url', 'launcher'), false) AS exits,
        c.reason = 'nodes' AS rescales,
        -- In synchronous mode training waits from the beginning to the commit, else until the state is copied.
        c.at_us - (1e6 * (coalesce(k.write_s, 0) + coalesce(k.seal_s, 0) + coalesce(k.vote_s, 0)))::BIGINT AS copied_us,
        copied_us - (1e6 * coalesce(k.stall_s, 0))::BIGINT AS begun_us,
        if(k.stall_s IS NULL, c.at_us, copied_us) AS done_us
    FROM signs AS c
    LEFT JOIN signs AS p ON p.run = c.run AND p.kind = 'checkpoint' AND p.checkpoint_id = c.parent
    LEFT JOIN checkpoint_costs AS k ON k.run = c.run AND k.seq = c.seq
    LEFT JOIN lineage AS l ON l.run = c.run AND l.checkpoint_id = c.checkpoint_id
    WHERE c.kind = 'checkpoint'
    UNION ALL
    FROM remembered
),
later AS (
    SELECT run, attempt, steps, begun_us - lag(done_us) OVER (PARTITION BY run, attempt ORDER BY seq) AS took_us FROM taken
),
paces AS (
    SELECT run, attempt, sum(took_us) / sum(steps) AS us_per_step
    FROM later
    WHERE took_us > 0 AND steps > 0
    GROUP BY GROUPING SETS ((run, attempt), (run))
),
committed AS (
    SELECT run, attempt, arg_min(steps, seq) AS first_steps, arg_min(begun_us, seq) AS first_us,
        arg_max(exits, seq) AS exits, arg_max(rescales, seq) AS rescales
    FROM taken
    GROUP BY run, attempt
),
failures AS (
    SELECT r.run, r.replaced_attempt AS attempt, min(epoch_us(r.failed_at)) AS failed_us,
        max((1e6 * r.work_lost_s)::BIGINT) FILTER (r.outcome <> 'gave up') AS lost_us,
        bool_or(t.attempt IS NOT DISTINCT FROM r.replaced_attempt OR m.attempt IS NOT NULL) AS kept
    FROM recoveries AS r
    LEFT JOIN signs AS t ON t.run = r.run AND t.kind = 'checkpoint' AND t.checkpoint_id = r.resumed_from
    LEFT JOIN remembered AS m ON m.run = r.run AND m.attempt = r.replaced_attempt
    WHERE r.outcome <> 'rejoined'
    GROUP BY r.run, r.replaced_attempt
),
recovering AS (
    SELECT run, attempt, bool_or(outcome = 'failed again') AS in_vain,
        min(epoch_us(failed_at) + (1e6 * total_s)::BIGINT) FILTER (outcome = 'resumed') AS stepped_us
    FROM recoveries
    WHERE outcome NOT IN ('gave up', 'rejoined')
    GROUP BY run, attempt
),
lasts AS (
    SELECT run, attempt, max(at_us) AS last_us, bool_or(kind = 'finish') AS finished FROM signs GROUP BY run, attempt
),
attempts AS (
    SELECT c.run, c.attempt, c.seq, c.at_us AS claimed_us, lead(c.at_us) OVER (PARTITION BY c.run ORDER BY c.seq) AS next_us,
        c.claim.purpose IS NULL AS trains,
        e.last_us, e.finished, k.first_us, k.first_steps, coalesce(k.exits, false) AS exits, coalesce(k.rescales, false) AS rescales,
        f.failed_us, f.lost_us, f.kept, coalesce(r.in_vain, false) AS in_vain, r.stepped_us,
        coalesce(own.us_per_step, whole.us_per_step) AS us_per_step
    FROM signs AS c
    JOIN lasts AS e USING (run, attempt)
    LEFT JOIN committed AS k USING (run, attempt)
    LEFT JOIN failures AS f USING (run, attempt)
    LEFT JOIN recovering AS r USING (run, attempt)
    LEFT JOIN paces AS own USING (run, attempt)
    LEFT JOIN paces AS whole ON whole.run = c.run AND whole.attempt IS NULL
    WHERE c.kind = 'claim'
),
-- Marks in the order of what happened. Each ends the time since the mark before it, and names its cause.
marks AS (
    SELECT run, seq, 0 AS place, 0 AS number, claimed_us AS at_us, 'idle' AS cause FROM attempts
    UNION ALL
    SELECT run, seq, 1, 0,
        CASE
            WHEN in_vain THEN coalesce(failed_us, next_us, last_us)
            WHEN stepped_us IS NOT NULL THEN stepped_us
            WHEN lost_us > 0 AND NOT kept THEN failed_us - lost_us
            WHEN first_us IS NOT NULL THEN first_us - coalesce((first_steps * us_per_step)::BIGINT, 0)
            ELSE coalesce(failed_us, last_us)
        END,
        CASE
            WHEN in_vain OR stepped_us IS NOT NULL THEN 'down'
            WHEN lost_us > 0 AND NOT kept THEN 'startup'
            WHEN first_us IS NOT NULL THEN if(us_per_step IS NULL, 'unknown', 'startup')
            ELSE if(lost_us = 0, 'startup', 'unknown')
        END
    FROM attempts
    WHERE trains
    UNION ALL
    SELECT run, a.seq, 2, 2 * t.seq + waited, if(waited = 1, t.done_us, t.begun_us),
        CASE WHEN waited = 1 THEN 'checkpointing' WHEN t.survives THEN 'trained' ELSE 'abandoned' END
    FROM taken AS t JOIN attempts AS a USING (run, attempt) CROSS JOIN (VALUES (0), (1)) AS halves (waited)
    WHERE trains
    UNION ALL
    SELECT run, seq, 3, 0, coalesce(failed_us, last_us),
        CASE
            WHEN failed_us IS NOT NULL THEN if(exits, 'down', 'replayed')
            ELSE if(exits OR finished, 'checkpointing', 'unknown')
        END
    FROM attempts
    WHERE trains
    UNION ALL
    SELECT run, seq, 4, 0, next_us,
        CASE
            WHEN NOT trains THEN 'idle'
            WHEN failed_us IS NOT NULL THEN 'down'
            ELSE if(finished OR (exits AND NOT rescales), 'idle', 'unknown')
        END
    FROM attempts
    WHERE next_us IS NOT NULL
),
-- No mark is before an earlier one, or past the next claim: an attempt that is fenced off may train on, and nothing counts.
reached AS (
    SELECT m.*, a.attempt, max(least(m.at_us, a.next_us)) OVER (PARTITION BY run ORDER BY seq, place, number) AS until_us
    FROM marks AS m JOIN attempts AS a USING (run, seq)
),
spans AS (
    SELECT run, attempt, cause, until_us, coalesce(lag(until_us) OVER (PARTITION BY run ORDER BY seq, place, number), until_us) AS since_us,
        (until_us - since_us)::DECIMAL(18, 0) * 0.000001::DECIMAL(6, 6) AS spent_s
    FROM reached
)
SELECT
    run, attempt, make_timestamptz(min(since_us)) AS from_at, make_timestamptz(max(until_us)) AS to_at,
    coalesce(sum(spent_s) FILTER (cause = 'trained'), 0) AS trained_s,
    coalesce(sum(spent_s) FILTER (cause = 'abandoned'), 0) AS abandoned_s,
    coalesce(sum(spent_s) FILTER (cause = 'replayed'), 0) AS replayed_s,
    coalesce(sum(spent_s) FILTER (cause = 'checkpointing'), 0) AS checkpointing_s,
    coalesce(sum(spent_s) FILTER (cause = 'down'), 0) AS down_s,
    coalesce(sum(spent_s) FILTER (cause = 'startup'), 0) AS startup_s,
    coalesce(sum(spent_s) FILTER (cause = 'idle'), 0) AS idle_s,
    coalesce(sum(spent_s) FILTER (cause = 'unknown'), 0) AS unknown_s
FROM spans
GROUP BY run, attempt;

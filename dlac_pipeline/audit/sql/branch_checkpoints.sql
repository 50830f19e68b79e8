-- One row per checkpoint, with its branch: a sequence of checkpoints in order of seq, each the parent of the next.
-- branch_parent is the checkpoint that the branch grew from, in the run parent_run: another run if it was forked. A walk to the
-- root takes one step per rewind or fork, not one per checkpoint.
CREATE OR REPLACE VIEW branch_checkpoints AS
WITH linked AS (
    SELECT
        run, checkpoint_id, coalesce(parent, forked_from) AS parent, seq,
        CASE WHEN parent IS NULL AND forked_from IS NOT NULL THEN forked_run ELSE run END AS parent_run,
        parent IS NOT DISTINCT FROM lag(checkpoint_id) OVER (PARTITION BY run ORDER BY seq) AS follows
    FROM checkpoints
),
numbered AS (
    SELECT *, sum(CASE WHEN follows THEN 0 ELSE 1 END) OVER (PARTITION BY run ORDER BY seq) AS branch
    FROM linked
)
SELECT run, checkpoint_id, seq, branch,
    arg_min_null(parent, seq) OVER (PARTITION BY run, branch) AS branch_parent,
    arg_min_null(parent_run, seq) OVER (PARTITION BY run, branch) AS parent_run
FROM numbered;

-- Each checkpoint with its branch: a branch is a sequence of checkpoints, in order of seq, of which each is the parent of the
-- next, and branch_parent is the checkpoint that it grew from. Thus a walk to the root takes one step per rewind, not one
-- per checkpoint.
CREATE OR REPLACE VIEW branches AS
WITH linked AS (
    SELECT
        run, checkpoint_id, parent, seq,
        parent IS NOT DISTINCT FROM lag(checkpoint_id) OVER (PARTITION BY run ORDER BY seq) AS follows
    FROM checkpoints
),
numbered AS (
    SELECT *, sum(CASE WHEN follows THEN 0 ELSE 1 END) OVER (PARTITION BY run ORDER BY seq) AS branch
    FROM linked
)
SELECT run, checkpoint_id, seq, branch, arg_min_null(parent, seq) OVER (PARTITION BY run, branch) AS branch_parent
FROM numbered;

-- True if a checkpoint has read the whole row. Like `touched`, but the last row of an advance with a token_end does not count:
-- only its first tokens were read.
CREATE OR REPLACE MACRO consumed(file, file_row, checkpoint) AS EXISTS (
    FROM (VALUES (file, file_row, checkpoint)) AS target (in_file, in_row, in_checkpoint)
    JOIN row_positions(in_file, in_row) AS r ON true
    JOIN consumption AS a USING (cut_id, plan_id, key_group, block)
    JOIN branch_checkpoints AS b ON b.checkpoint_id = a.checkpoint_id
    JOIN ancestor_branches(in_checkpoint) AS walk ON walk.run = b.run AND walk.branch = b.branch AND b.seq <= walk.upto
    WHERE a.kind = 'advance' AND NOT r.is_dead
        AND r.position >= a.position_start AND r.position < a.position_end
        AND (a.token_end IS NULL OR r.position < a.position_end - 1)
        AND NOT coalesce(list_contains(a.filtered, r.position), false)
        AND NOT coalesce(list_contains(a.quarantined, r.position), false)
);

-- True if a checkpoint has read a row, at least in part: an advance of the checkpoint or of an ancestor covers its position.
-- Rows that were dead then, filtered or quarantined do not count.
CREATE OR REPLACE MACRO touched(file, file_row, checkpoint) AS EXISTS (
    FROM (VALUES (file, file_row, checkpoint)) AS target (in_file, in_row, in_checkpoint)
    JOIN row_positions(in_file, in_row) AS r ON true
    JOIN consumption AS a USING (cut_id, plan_id, key_group, block)
    -- The ancestors are not listed: a branch has many, and few of them have covered the row.
    JOIN branch_checkpoints AS b ON b.checkpoint_id = a.checkpoint_id
    JOIN ancestor_branches(in_checkpoint) AS walk ON walk.run = b.run AND walk.branch = b.branch AND b.seq <= walk.upto
    WHERE a.kind = 'advance' AND NOT r.is_dead
        AND r.position >= a.position_start AND r.position < a.position_end
        AND NOT coalesce(list_contains(a.filtered, r.position), false)
        AND NOT coalesce(list_contains(a.quarantined, r.position), false)
);

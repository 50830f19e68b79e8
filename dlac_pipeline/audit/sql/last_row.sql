-- The last row of an advance that consumed some.
SELECT file_path, row, checkpoint_id
FROM consumed_positions
WHERE run = $run AND checkpoint_id = $checkpoint_id AND cut_id = $cut_id AND key_group = $key_group AND block = $block
    AND position >= $position_start AND position < $position_end
ORDER BY position DESC
LIMIT 1;

-- One row per block that advances moved over, and the position up to which they did. is_tiled: the first advance begins at
-- position 0, and each other one where the one before it ends. So it is if no advance is empty and the sorted beginnings,
-- without the first, are the sorted ends, without the last: n ends are at or before an end, and only n advances begin before it.
CREATE OR REPLACE VIEW block_tiles AS
WITH listed AS (
    SELECT run, source, cut_id, key_group, block, max(read_to) AS covered_to, min(position_start) AS first_start,
        bool_and(coalesce(position_start < read_to, false)) AS none_empty,
        list_sort(list(position_start)) AS starts, list_sort(list(read_to)) AS ends
    FROM advances
    GROUP BY ALL
)
SELECT run, source, cut_id, key_group, block, covered_to,
    first_start = 0 AND none_empty AND starts[2:] = ends[1:len(ends) - 1] AS is_tiled
FROM listed;

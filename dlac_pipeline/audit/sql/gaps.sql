-- One row per interval of positions with live rows that was never consumed although the key group's cursor is behind it.
CREATE OR REPLACE VIEW gaps AS
SELECT run, source, cut_id, pass, key_group, block, position_start, position_end, live_rows AS rows
FROM intervals
WHERE kind = 'hole' AND live_rows > 0;

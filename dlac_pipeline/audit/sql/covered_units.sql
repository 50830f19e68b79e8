SELECT file_path, row_group, sum(live_rows)::BIGINT AS live_rows, sum(rows_consumed + rows_passed)::BIGINT AS rows_consumed,
    sum(rows_repeated)::BIGINT AS rows_repeated
FROM coverage
WHERE run = ?
GROUP BY ALL
ORDER BY ALL

-- Row ids that advances name: by cut, key group and block to slices, by unit and row to the data files. Rows that are dead in
-- the plan that an advance names were passed over.
SELECT advances.step, data.row_id
FROM (SELECT *, unnest(range(first_row, first_row + rows)) AS row FROM slices) s
JOIN advances USING (cut_id, key_group, block)
JOIN plans ON plans.plan_id = advances.plan_id
JOIN work_units u ON u.write_id = plans.write_id AND u.unit = s.unit
JOIN data ON data.file_path = u.file_path AND data.at = u.first_row + s.row
WHERE (a_inv * ((base + row - s.first_row - c + block_rows) % block_rows)) % block_rows >= position_start
  AND (a_inv * ((base + row - s.first_row - c + block_rows) % block_rows)) % block_rows < position_end
  AND len(list_filter(u.dead, lambda span: row >= span.first AND row < span.first + span.rows)) = 0
ORDER BY ALL

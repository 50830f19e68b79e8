-- Row ids that advances name: by cut, key group and block to slices, by unit and row to the data files.
SELECT advances.step, data.row_id
FROM (SELECT *, unnest(range(first_row, first_row + rows)) AS row FROM slices) s
JOIN advances USING (cut_id, key_group, block)
JOIN plans ON plans.plan_id = s.plan_id
JOIN work_units u ON u.write_id = plans.write_id AND u.unit = s.unit
JOIN data ON data.file_path = u.file_path AND data.at = u.first_row + s.row
WHERE (a_inv * ((base + row - s.first_row - c + block_rows) % block_rows)) % block_rows >= position_start
  AND (a_inv * ((base + row - s.first_row - c + block_rows) % block_rows)) % block_rows < position_end
ORDER BY ALL

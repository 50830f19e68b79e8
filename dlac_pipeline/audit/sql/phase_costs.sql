SELECT step, coalesce(copy_s, 0) AS copy, coalesce(write_s, 0) AS write, coalesce(seal_s, 0) AS seal,
    coalesce(vote_s, 0) AS vote, coalesce(stall_s, copy + write + seal + vote) AS stall, bytes
FROM checkpoint_costs
WHERE run = ?
ORDER BY seq

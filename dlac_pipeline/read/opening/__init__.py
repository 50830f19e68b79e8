"""Opening of a leg: its sources, the streams of their samples, the columns of its batches, and readers for any rank."""

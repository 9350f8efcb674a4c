"""Jobs on topics: L0 and L1 garbage collection, extent merges, log compaction, rollups, group offsets, holds."""

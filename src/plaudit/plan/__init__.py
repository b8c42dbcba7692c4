"""What a run will take, and which placement takes least: profile, cost model, search."""

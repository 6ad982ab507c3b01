"""The trainer's side: state, snapshot, fence, checkpointer. The only floor that knows torch."""

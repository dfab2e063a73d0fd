"""Which score of tokens predicts what an update does without them? See RESULTS.md."""

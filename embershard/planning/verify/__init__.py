"""What a run did beside what its plan predicted."""

"""A new plan beside the one that a run trains by: what each change gains, which rows move, after how long it pays."""

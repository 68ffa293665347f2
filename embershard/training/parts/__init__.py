"""What a run may have beside its steps: saves, evaluations, publications, followed files and counts."""

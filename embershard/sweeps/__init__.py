"""Many runs of one experiment, on this machine or on a cluster."""

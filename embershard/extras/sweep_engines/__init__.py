"""Where a sweep runs beside this machine: Ray, Slurm, Kubernetes."""

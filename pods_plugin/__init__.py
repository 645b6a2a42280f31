"""verl-pods: generate many rollouts, train on the few that teach (PODS, arXiv 2504.13818) as a plugin of verl."""

__version__ = "0.1.0"

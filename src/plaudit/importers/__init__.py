"""Read settings files of other systems, with one module and usually one YAML table for each system."""

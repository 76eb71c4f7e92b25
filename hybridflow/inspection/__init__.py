"""What `hybridflow.health` looks at: packages, machines, links, disks, inputs, and whether a plan fits."""

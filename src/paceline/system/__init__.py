"""What the operating system tells a process of the machine, and what a process may have."""

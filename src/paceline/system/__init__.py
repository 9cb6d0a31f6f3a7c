"""What the operating system tells a process of its machine, and what it lets one have."""

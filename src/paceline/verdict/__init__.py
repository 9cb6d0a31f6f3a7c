"""What decides how long a run's steps take: data, communication, the host, or the computing itself."""

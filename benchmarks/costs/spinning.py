"""What threads that wait by spinning cost a step on a CPU: on idle cores, and beside other programs that compute.

python -m benchmarks.costs.spinning
"""

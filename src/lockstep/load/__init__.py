"""Load measurement of a server that speaks OpenAI's API or Triton's.

The workload and its arrivals, the client, and the figures of its records.
"""

"""Load measurement of a server that speaks OpenAI's API or Triton's: workload, arrivals, client, figures."""

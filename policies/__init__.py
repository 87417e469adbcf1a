"""What to keep and what to fetch, and the residency bookkeeping around it. No clocks, no bandwidths, no devices."""

"""What results are: their columns, comparisons, diagnoses and plots."""

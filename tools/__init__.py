"""Commands that no training needs: a plan, a probe, questions to a model, times, profiles."""

"""Ways to propose a tree. Every drafter has the face described in `drafters.base`; the step never knows which one runs."""

"""Who runs what, predicted before anything loads.

`planner.plan_placement(model, cluster=..., workload=..., constraints=...)` finds the best
`plan.PlanResult`;
`time_model.predict(plan, model=..., cluster=..., workload=...)` predicts any plan;
`replan.replan(...)` changes a running one; `simulator.simulate(...)` runs one on paper.
"""

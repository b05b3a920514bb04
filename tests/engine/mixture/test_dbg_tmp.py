from tests.engine.mixture.test_recording import *
from tests.engine.mixture.zoo import zoo
from dynajax.policy.experts import planner as pm
def test_dbg(zoo,tmp_path):
    logs={'e':[], 's':[]}; cur='e'
    def wrap(patch):
        for name in ('plan_step','prefetch','background','start_sequence','applied','observe'):
            f=getattr(ExpertPlanner,name)
            def g(self,*a,_f=f,_n=name,**k):
                r=_f(self,*a,**k)
                def s(x): return x.tolist() if isinstance(x,np.ndarray) else x
                if _n=='plan_step': logs[cur].append((_n,a[0],s(a[1]),k.get('room'),k.get('transit'),k.get('copy_busy_s'),r.hot.tolist(),r.units.tolist(),r.slots.tolist()))
                elif _n in('background',): logs[cur].append((_n,a[0],r.units.tolist(),r.slots.tolist()))
                elif _n=='prefetch': logs[cur].append((_n,a[0],s(a[1]),None if r is None else (r.units.tolist(),r.slots.tolist())))
                elif _n=='start_sequence': logs[cur].append((_n, None if not a or a[0] is None else a[0].sum(1).tolist(), self._cache._score.round(4).tolist()[0] if hasattr(self._cache,'_score') else 0))
                else: logs[cur].append((_n,*[s(x) for x in a]))
                return r
            patch.setattr(ExpertPlanner,name,g)
    with pytest.MonkeyPatch.context() as patch:
        wrap(patch)
        with opened(zoo.folder(FAMILY), 0.4, deterministic=True, set={"record_scores": True, "move_price": 0.0, "prefetch_price": 0.0}, policy='scan', batch=2) as engine:
            trace,_=record(engine,tmp_path,BATCH); spec=engine._parts.prepared.spec
            fr=engine._parts.mixture.frequency
        cur='s'
        simulated(trace,spec)
    print('freq',fr[0], trace.frequency[0])
    for k in logs:
        print(k)
        for l in logs[k][:40]: print('  ',l)

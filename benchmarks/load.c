// Load generator: epoll, one thread. SSE-aware; every token event carries " ~SEQ@US" (CLOCK_MONOTONIC us of engine send).
// One event may carry several tokens; each is checked and counted. The first token is the first event with a token, not the role chunk.
// load -p PORT [-k API_KEY] [-c conc] [-n reqs] [-r rate/s (0=closed loop)] [-N tokens] [-s (stream)] [-T secs] [-H "Header: v"]... [-u path] [-m model] [-b prompt_bytes] [-X frac_abort] [-U (no include_usage)] [-A (any event count)] [-P (Poisson arrivals at -r)]
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <stdint.h>
#include <unistd.h>
#include <errno.h>
#include <signal.h>
#include <time.h>
#include <math.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#define NB 4096
typedef struct { uint64_t b[NB]; uint64_t n; double sum; uint64_t mx; } hist;
static int bidx(uint64_t v){ if(v<64) return v; int l=63-__builtin_clzll(v); int i=(l-5)*64+((v>>(l-6))&63); return i>=NB?NB-1:i; }
static uint64_t bval(int i){ if(i<64) return i; int l=i/64+5; uint64_t m=64+(i%64); return (m<<(l-6))+((1ull<<(l-6))>>1); }
static void rec(hist*h,int64_t v){ if(v<0)v=0; h->b[bidx(v)]++;h->n++;h->sum+=v;if((uint64_t)v>h->mx)h->mx=v; }
static uint64_t pct(hist*h,double p){ uint64_t t=h->n*p,s=0; for(int i=0;i<NB;i++){s+=h->b[i]; if(s>t) return bval(i);} return h->mx; }
static void ph(const char*n,hist*h){ printf("\"%s\":{\"n\":%lu,\"mean\":%.1f,\"p50\":%lu,\"p90\":%lu,\"p95\":%lu,\"p99\":%lu,\"p999\":%lu,\"max\":%lu}",n,h->n,h->n?h->sum/h->n:0,pct(h,.5),pct(h,.9),pct(h,.95),pct(h,.99),pct(h,.999),h->mx); }
static uint64_t now_ns(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec*1000000000ull+t.tv_nsec;}
enum {IDLE,HDR,CL,CHSZ,CHD,CHCR,CHTR,EOFB};
typedef struct { int fd,st,idx; char h[8192]; size_t hl; long left; int status,closeit,ischunk; char line[8192]; size_t ll; char szb[32]; int szl;
  uint64_t t0,tfirst,tlast; long events; int seq,bad,done; long bytes; int abort_at; } conn;
static conn *cs; static int ep; static struct sockaddr_in A; static conn **fr; static int nf;
static hist hT,hL,hG,hA,hLate; static long ok,err_status,err_count,err_conn,err_seq,aborted,tot_ev,tot_tok,tot_bytes,reads; static int stream=0,ntok=300; static char*req; static size_t reql;
static long started,finished,R=1000; static int lastst; static uint64_t now; static double xab=0; static long exp_ev; static long badn; static double nextarr=0; static int poi=0,anyc=0;
static int dial(conn*c){ c->fd=socket(AF_INET,SOCK_STREAM,0); if(connect(c->fd,(void*)&A,sizeof A)){close(c->fd);c->fd=-1;return -1;} int one=1; setsockopt(c->fd,IPPROTO_TCP,TCP_NODELAY,&one,sizeof one);
  struct epoll_event e={.events=EPOLLIN|EPOLLRDHUP,.data.ptr=c}; epoll_ctl(ep,EPOLL_CTL_ADD,c->fd,&e); c->st=IDLE; return 0; }
static void hang(conn*c){ if(c->fd>=0){close(c->fd);c->fd=-1;} }
static void start(conn*c){ c->t0=now_ns(); if(c->fd<0&&dial(c)){err_conn++;finished++;started++;fr[nf++]=c;return;}
  c->st=HDR;c->hl=0;c->ll=0;c->szl=0;c->tfirst=c->tlast=0;c->events=0;c->seq=0;c->bad=0;c->done=0;c->bytes=0;c->closeit=0;c->ischunk=0;started++; c->abort_at=(xab>0&&drand48()<xab)?1+(int)(drand48()*ntok):0;
  ssize_t k=send(c->fd,req,reql,MSG_NOSIGNAL); if(k!=(ssize_t)reql){ err_conn++; hang(c); finished++; c->st=IDLE; fr[nf++]=c; } }
static void fin(conn*c,int e){ finished++; c->st=IDLE; if(e==2)aborted++; else if(e){err_conn++;} else { lastst=c->status; if(c->status!=200)err_status++; else if(stream&&((!anyc&&c->events!=exp_ev)||!c->done)){err_count++;badn=c->events;} else if(stream&&(c->bad||c->seq!=ntok))err_seq++; else {ok++; rec(&hA,(now-c->t0)/1000);} }
  tot_ev+=c->events; tot_bytes+=c->bytes; if(e||c->closeit) hang(c); fr[nf++]=c; }
// Surfaces by path. A line with one of the marks near its start ends a stream; responses tell the whole text again, which is skipped.
typedef struct { const char*path,*text,*ends[2]; } surface;
static const surface S[]={{"/v1/generations",NULL,{"\"status\":\"completed\"",NULL}},{"/v1/responses","output_text.delta",{"\"response.completed\"","\"response.incomplete\""}},{"/v1/messages",NULL,{"\"message_stop\"",NULL}},{NULL,NULL,{"[DONE]",NULL}}}; static const surface*su;
static int near(const char*s,size_t n,const char*m){ return m&&memmem(s,n<160?n:160,m,strlen(m))!=NULL; }
static void line(conn*c,const char*s,size_t n){ if(n&&s[n-1]=='\r')n--; if(n<5||memcmp(s,"data:",5))return; c->events++; int any=0;
  if(!su->text||near(s,n,su->text))
  for(const char*q=s,*z=s+n;(q=memchr(q,'~',z-q));q++){ any=1; tot_tok++; if(!c->tfirst){c->tfirst=now;rec(&hT,(now-c->t0)/1000);} int v=atoi(q+1); if(v!=c->seq)c->bad=1; c->seq=v+1; const char*at=memchr(q,'@',z-q); if(at){ int64_t ts=strtoll(at+1,NULL,10); rec(&hL,(int64_t)(now/1000)-ts);} }
  if(any) return;
  if(near(s,n,su->ends[0])||near(s,n,su->ends[1]))c->done=1; }
// Of a line that comes in pieces, its beginning is kept: what is longer than that is a response told again.
static size_t hold(conn*c,const char*s,size_t n){ size_t room=sizeof c->line-c->ll,k=n<room?n:room; memcpy(c->line+c->ll,s,k); return c->ll+=k; }
static void body(conn*c,const char*s,size_t n){ c->bytes+=n; if(!stream){ if(!c->tfirst){c->tfirst=now;rec(&hT,(now-c->t0)/1000);} return; }
  while(n){ const char*e=memchr(s,'\n',n); if(!e){ hold(c,s,n); return; }
   size_t k=e-s; if(c->ll){ line(c,c->line,hold(c,s,k)); c->ll=0; } else line(c,s,k); s+=k+1;n-=k+1; } }
// returns 1 when response complete
static int feed(conn*c,const char*s,size_t n){ while(n){ switch(c->st){
  case HDR:{ size_t k=n; if(c->hl+k>sizeof c->h-1)k=sizeof c->h-1-c->hl; memcpy(c->h+c->hl,s,k); c->h[c->hl+k]=0; char*e=memmem(c->h,c->hl+k,"\r\n\r\n",4); if(!e){c->hl+=k;return 0;}
    size_t used=e+4-c->h-c->hl; s+=used;n-=used; *e=0; c->status=atoi(c->h+9); c->left=-1; for(char*l=strstr(c->h,"\r\n");l;l=strstr(l,"\r\n")){l+=2; if(!strncasecmp(l,"content-length:",15))c->left=atol(l+15); else if(!strncasecmp(l,"transfer-encoding: chunked",26))c->ischunk=1; else if(!strncasecmp(l,"connection: close",17))c->closeit=1;}
    if(c->ischunk)c->st=CHSZ; else if(c->left>=0){c->st=CL; if(!c->left)return 1;} else {c->st=EOFB;c->closeit=1;} break; }
  case CL:{ size_t k=n<(size_t)c->left?n:(size_t)c->left; body(c,s,k); c->left-=k; s+=k;n-=k; if(!c->left)return 1; break; }
  case EOFB: body(c,s,n); return 0;
  case CHSZ:{ char ch=*s++;n--; if(ch=='\n'){ c->szb[c->szl]=0; c->left=strtol(c->szb,NULL,16); c->szl=0; c->st=c->left?CHD:CHTR; } else if(c->szl<30)c->szb[c->szl++]=ch; break; }
  case CHD:{ size_t k=n<(size_t)c->left?n:(size_t)c->left; body(c,s,k); c->left-=k; s+=k;n-=k; if(!c->left)c->st=CHCR; break; }
  case CHCR:{ char ch=*s++;n--; if(ch=='\n')c->st=CHSZ; break; }
  case CHTR:{ char ch=*s++;n--; if(ch=='\n')return 1; break; } // no trailers
  default: return 0; } } return 0; }
int main(int ac,char**av){ signal(SIGPIPE,SIG_IGN); srand48(42); int port=9000,c=1,o; double rate=0,T=30; char hdrs[4096]="",*path="/v1/chat/completions",*model="m",*more=""; int pb=200,nou=0;
 while((o=getopt(ac,av,"p:k:c:n:r:N:sT:H:u:m:b:X:B:UPA"))>0) switch(o){case 'p':port=atoi(optarg);break;case 'k':strcat(hdrs,"Authorization: Bearer ");strcat(hdrs,optarg);strcat(hdrs,"\r\n");break;case 'c':c=atoi(optarg);break;case 'n':R=atol(optarg);break;case 'r':rate=atof(optarg);break;case 'N':ntok=atoi(optarg);break;case 's':stream=1;break;case 'T':T=atof(optarg);break;case 'H':strcat(hdrs,optarg);strcat(hdrs,"\r\n");break;case 'u':path=optarg;break;case 'm':model=optarg;break;case 'B':more=optarg;break;case 'b':pb=atoi(optarg);break;case 'X':xab=atof(optarg);break;case 'U':nou=1;break;case 'P':poi=1;break;case 'A':anyc=1;break;}
 char*pr=malloc(pb+1); memset(pr,'x',pb); for(int i=5;i<pb;i+=6)pr[i]=' '; pr[pb]=0; char*bd; int bl; int chat=strstr(path,"/chat/")!=NULL; for(su=S;su->path&&strcmp(su->path,path);)su++; exp_ev=ntok+2+(nou?0:1);
 const char*sf=stream?"true":"false";
 if(su==&S[0]) bl=asprintf(&bd,"{\"model_alias\":\"%s\",\"input\":\"%s\",\"max_output_tokens\":%d,\"temperature\":0.7,\"stream\":%s%s}",model,pr,ntok,sf,more);
 else if(su==&S[1]) bl=asprintf(&bd,"{\"model\":\"%s\",\"input\":\"%s\",\"max_output_tokens\":%d,\"temperature\":0.7,\"stream\":%s%s}",model,pr,ntok,sf,more);
 else if(su==&S[2]) bl=asprintf(&bd,"{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"max_tokens\":%d,\"temperature\":0.7,\"stream\":%s}",model,pr,ntok,sf);
 else if(chat) bl=asprintf(&bd,"{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"max_tokens\":%d,\"temperature\":0.7,\"stream\":%s%s}",model,pr,ntok,stream?"true":"false",stream&&!nou?",\"stream_options\":{\"include_usage\":true}":"");
 else bl=asprintf(&bd,"{\"model\":\"%s\",\"prompt\":\"%s\",\"max_tokens\":%d,\"temperature\":0.7,\"stream\":%s%s}",model,pr,ntok,stream?"true":"false",stream&&!nou?",\"stream_options\":{\"include_usage\":true}":"");
 reql=asprintf(&req,"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nAccept: */*\r\n%sContent-Length: %d\r\n\r\n%s",path,port,hdrs,bl,bd);
 A.sin_family=AF_INET;A.sin_port=htons(port);A.sin_addr.s_addr=htonl(INADDR_LOOPBACK); ep=epoll_create1(0); cs=calloc(c,sizeof*cs); fr=calloc(c+1,sizeof*fr); for(int i=0;i<c;i++){cs[i].fd=-1;cs[i].idx=i;} for(int i=c-1;i>=0;i--)fr[nf++]=&cs[i];
 if(c<=100) for(int i=0;i<c;i++) if(dial(&cs[i])) err_conn++; // larger pools dial lazily
 uint64_t s0=now_ns(),endt=s0+(uint64_t)(T*1e9); struct epoll_event ev[512]; static char buf[262144]; long late=0;
 while(finished<R){ now=now_ns(); if(now>endt)break;
  double wait=0.2; 
  if(rate>0){ while(started<R){ uint64_t due=s0+(uint64_t)(nextarr*1e9); if(due>now){ wait=(due-now)/1e9; break; } if(!nf){wait=0.2;break;} rec(&hLate,(now-due)/1000); nextarr+=(poi?-log(1-drand48()):1.0)/rate; start(fr[--nf]); } }
  else while(started<R&&nf) start(fr[--nf]);
  if(wait>0.2)wait=0.2; struct timespec ts={0,(long)(wait*1e9)}; int n=epoll_pwait2(ep,ev,512,&ts,NULL);
  for(int i=0;i<n;i++){ conn*k=ev[i].data.ptr; if(k->fd<0)continue; ssize_t r=recv(k->fd,buf,sizeof buf,MSG_DONTWAIT); now=now_ns(); reads++;
   if(r<0){ if(errno==EAGAIN)continue; r=0; }
   if(r==0){ if(k->st==EOFB) fin(k,0); else if(k->st!=IDLE) fin(k,1); else hang(k); continue; }
   if(k->st==IDLE)continue;
   if(stream&&k->tfirst){ if(k->tlast)rec(&hG,(now-k->tlast)/1000); } long e0=k->events; int d=feed(k,buf,r); if(k->events!=e0)k->tlast=now;
   if(d) fin(k,0); else if(k->abort_at&&k->events>=k->abort_at) fin(k,2); } }
 double el=(now_ns()-s0)/1e9; long inc=0; for(int i=0;i<c;i++) if(cs[i].fd>=0&&cs[i].st!=IDLE){ inc++; tot_ev+=cs[i].events; }
 printf("{\"ok\":%ld,\"finished\":%ld,\"started\":%ld,\"incomplete\":%ld,\"err_status\":%ld,\"err_count\":%ld,\"err_seq\":%ld,\"err_conn\":%ld,\"aborted\":%ld,\"last_status\":%d,\"bad_events\":%ld,\"elapsed\":%.4f,\"rps\":%.1f,\"events\":%ld,\"eps\":%.0f,\"tokens\":%ld,\"tps\":%.0f,\"reads\":%ld,\"ev_per_read\":%.2f,\"bytes\":%ld,",ok,finished,started,inc,err_status,err_count,err_seq,err_conn,aborted,lastst,badn,el,finished/el,tot_ev,tot_ev/el,tot_tok,tot_tok/el,reads,reads?(double)tot_ev/reads:0,tot_bytes);
 ph("ttft",&hT);printf(",");ph("chunk_lat",&hL);printf(",");ph("gap",&hG);printf(",");ph("total",&hA);printf(",");ph("late",&hLate);printf("}\n"); return 0; }

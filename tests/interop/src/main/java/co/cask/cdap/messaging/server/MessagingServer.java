package co.cask.cdap.messaging.server;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.conf.Constants.MessagingSystem;
import co.cask.cdap.common.conf.Constants.Service;
import co.cask.cdap.common.metrics.NoOpMetricsCollectionService;
import co.cask.cdap.common.utils.TimeProvider;
import co.cask.cdap.messaging.MessagingService;
import co.cask.cdap.messaging.service.MessagingServices;
import co.cask.cdap.messaging.store.leveldb.LevelDbStore;
import co.cask.http.HttpHandler;
import com.google.common.collect.ImmutableSet;
import org.apache.twill.discovery.Discoverable;
import org.apache.twill.discovery.InMemoryDiscoveryService;

/** CDAP's messaging server on a LevelDB store, for comparative measurements. */
public final class MessagingServer {
  private MessagingServer() {
  }

  /** Runs {@code MessagingServer DIR}: prints the port, and serves until it is killed. */
  public static void main(String[] args) throws Exception {
    CConfiguration conf = CConfiguration.create();
    conf.set(MessagingSystem.LOCAL_DATA_DIR, args[0]);
    conf.set(MessagingSystem.HTTP_SERVER_BIND_ADDRESS, "127.0.0.1");
    MessagingService service =
        MessagingServices.create(conf, new LevelDbStore(conf), TimeProvider.SYSTEM_TIME);
    InMemoryDiscoveryService discovery = new InMemoryDiscoveryService();
    ImmutableSet<HttpHandler> handlers = ImmutableSet.of(
        new MetadataHandler(service), new StoreHandler(service), new FetchHandler(conf, service));
    new MessagingHttpService(conf, discovery, new NoOpMetricsCollectionService(), handlers).startAndWait();
    for (Discoverable found : discovery.discover(Service.MESSAGING_SERVICE)) {
      System.out.println(found.getSocketAddress().getPort());
    }
    Thread.currentThread().join();
  }
}
